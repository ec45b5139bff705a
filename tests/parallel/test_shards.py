"""Rows of matrices over two processes: what each holds, sums over all of them, and work on whole matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fixtures.processes import run_ranks
from tuner.parallel.fsdp import Layout, map_whole_matrices, sums_over_rows

SHAPES = [(5, 3), (4, 2), (1, 6)]
"""Rows that two processes share unevenly, evenly, and not at all."""


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def split(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A tensor in equal shards over all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(dim)])


def test_a_whole_tensor_is_all_here() -> None:
    layout = Layout.of(torch.zeros(5, 3))
    assert (layout.group, layout.rows) == (None, [5])
    assert sums_over_rows([torch.ones(2)], [layout])[0].tolist() == [1, 1]
    assert torch.equal(map_whole_matrices(torch.neg, [torch.ones(5, 3)], [layout])[0], -torch.ones(5, 3))


@pytest.mark.multi
def test_each_process_holds_the_rows_that_its_layout_says(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        sharded = [split(whole) for whole in matrices()]
        layouts = [Layout.of(tensor) for tensor in sharded]
        assert [layout.rows for layout in layouts] == [[3, 2], [2, 2], [1, 0]]
        for tensor, layout, whole in zip(sharded, layouts, matrices(), strict=True):
            own = tensor.to_local()
            start = sum(layout.rows[:rank])
            assert torch.equal(own, whole[start : start + layout.rows[rank]])

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
def test_a_tensor_split_by_columns_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(ValueError, match="not split by rows over one axis"):
            Layout.of(split(torch.zeros(4, 4), dim=1))

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
def test_sums_and_whole_matrices_are_those_of_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        sharded, alone = [split(whole) for whole in matrices()], torch.full((2, 2), float(rank))
        layouts = [*map(Layout.of, sharded), Layout.of(alone)]
        parts = [*(tensor.to_local() for tensor in sharded), alone]
        sums = sums_over_rows([part.sum(dim=0) for part in parts], layouts)
        for found, whole in zip(sums, matrices(), strict=False):
            assert torch.allclose(found, whole.sum(dim=0))
        assert sums[-1].tolist() == [2.0 * rank] * 2, "what is whole here is not summed over processes"

        seen: list[torch.Size] = []

        def flipped(matrix: torch.Tensor) -> torch.Tensor:
            seen.append(matrix.shape)
            return matrix.flip(0)  # rows change places between processes

        results = map_whole_matrices(flipped, parts, layouts)
        for found, layout, whole in zip(results, layouts, matrices(), strict=False):
            start = sum(layout.rows[:rank])
            assert torch.equal(found, whole.flip(0)[start : start + layout.rows[rank]])
        assert len(seen) == (3 if rank == 0 else 2), "every shared matrix is worked on once, by one process"

    assert run_ranks(2, tmp_path, work) == [0, 0]
