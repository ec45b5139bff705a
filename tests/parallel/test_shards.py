"""Parts of matrices over several processes: what each holds, sums over all of them, and work on whole matrices."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.processes import fake_group, run_ranks
from tests.parallel.meshes import STRIDED, mesh_of, placed
from tuner.parallel.layouts import added_up, layouts_of, map_whole_matrices, whole
from tuner.runtime.parts import part_of
from tuner.runtime.torch_private import FakeTensorMode

SHAPES = [(5, 3), (4, 2), (1, 6), (8, 4)]
"""Rows that processes share unevenly, evenly, and not at all."""


def matrices() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_a_whole_tensor_is_all_here() -> None:
    (layout,) = layouts_of([torch.zeros(5, 3)])
    assert layout.group is None and [box.sizes for box in layout.own.boxes] == [(5, 3)]
    assert added_up([torch.ones(2)], [layout])[0].tolist() == [1, 1]
    assert torch.equal(map_whole_matrices(torch.neg, [torch.ones(5, 3)], [layout])[0], -torch.ones(5, 3))


def ways() -> dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]:
    """Sizes of mesh axes with placements."""
    from torch.distributed.tensor import Replicate, Shard

    return {
        "rows": ((4,), (Shard(0),)), "columns": ((4,), (Shard(1),)),
        "rows and columns": ((2, 2), (Shard(0), Shard(1))), "rows of rows": ((2, 2), (STRIDED(0, 2), Shard(0))),
        "parts of rows": ((2, 2), (Shard(1), STRIDED(0, 2))), "copies of columns": ((2, 2), (Replicate(), Shard(1))),
    }


@pytest.mark.multi
def test_sums_and_whole_matrices_are_those_of_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for way, (axes, placements) in ways().items():
            sharded = [placed(one, axes, placements) for one in matrices()]
            alone = torch.full((2, 2), float(rank))
            layouts = layouts_of([*sharded, alone])
            parts = [*(tensor.to_local() for tensor in sharded), alone]
            for tensor, layout, one in zip(sharded, layouts, matrices(), strict=False):
                assert torch.equal(whole(tensor), one), way
                for box in layout.own.boxes:
                    assert torch.equal(box.within(tensor.to_local()), box.of(one)), way
            for dim in (0, 1):
                sums = added_up([part.sum(dim) for part in parts], layouts, [dim] * len(parts))
                for found, layout, one in zip(sums, layouts, matrices(), strict=False):
                    for box in layout.own.boxes:
                        here = slice(box.at[1 - dim], box.at[1 - dim] + box.sizes[1 - dim])
                        there = slice(box.offsets[1 - dim], box.offsets[1 - dim] + box.sizes[1 - dim])
                        assert torch.allclose(found[here], one.sum(dim)[there]), way
                assert sums[-1].tolist() == [2.0 * rank] * 2, "what is whole here is not summed over processes"
            totals = added_up([part.sum() for part in parts], layouts)
            for found, one in zip(totals, matrices(), strict=False):
                assert torch.allclose(found, one.sum()), way

            seen: list[torch.Size] = []

            def flipped(matrix: torch.Tensor, seen: list[torch.Size] = seen) -> torch.Tensor:
                seen.append(matrix.shape)
                return matrix.flip(0, 1)  # rows and columns change places between processes

            results = map_whole_matrices(flipped, parts, layouts)
            for found, layout, one in zip(results, layouts, matrices(), strict=False):
                for box in layout.own.boxes:
                    assert torch.equal(box.within(found), box.of(one.flip(0, 1))), way
            turns = torch.tensor(len(seen) - 1)
            torch.distributed.all_reduce(turns)
            copies = 2 if way == "copies of columns" else 1
            assert turns == copies * len(SHAPES), "every shared matrix is worked on once, by one process of each copy"

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.parametrize("rank", [0, 5])
def test_layouts_are_found_where_a_step_is_predicted(rank: int) -> None:
    """No tensor has numbers there, a mesh's own neither; over copies, shards and parts of layers at once."""
    from torch.distributed.tensor import Replicate, Shard

    with fake_group(rank, 8):
        mesh_of((2, 2, 2))  # before, as a launch's
        with FakeTensorMode():
            weight = placed(torch.zeros(8, 6), (2, 2, 2), (Replicate(), STRIDED(0, 2), Shard(0)))
            (layout,) = layouts_of([weight])
            assert layout.own == part_of(weight)
            assert torch.distributed.get_process_group_ranks(layout.group) == list(
                range(rank // 4 * 4, rank // 4 * 4 + 4)
            )
            assert [box.offsets[0] for part in layout.parts for box in part.boxes] == [0, 4, 2, 6]
            assert map_whole_matrices(torch.neg, [weight.to_local()], [layout])[0].shape == (2, 6)
