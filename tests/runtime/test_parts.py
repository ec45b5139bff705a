"""Which elements a process has, as torch itself cuts them; every element is somebody's, and once for each copy."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.parallel.meshes import STRIDED
from tuner.runtime.parts import cut_of, part_at

placements = st.one_of(
    st.just(Replicate()), st.builds(Shard, st.integers(0, 1)), st.builds(STRIDED, st.integers(0, 1), st.integers(2, 3))
)


def pieces(whole: torch.Tensor, placement: Any, count: int) -> list[torch.Tensor]:
    """A tensor as torch cuts it along one axis."""
    if placement.is_replicate():
        return [whole] * count
    found, _ = placement._split_tensor(whole, count, with_padding=False, contiguous=False)
    return list(found)


@settings(max_examples=150, deadline=None)
@given(st.tuples(st.integers(0, 13), st.integers(1, 7)), st.lists(st.tuples(placements, st.integers(1, 4)), max_size=3))
def test_parts_are_those_that_torch_cuts(shape: tuple[int, int], axes: list[tuple[Any, int]]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    seen = torch.zeros_like(whole)
    sizes, cuts = tuple(size for _, size in axes), tuple(cut_of(placement) for placement, _ in axes)
    for place in product(*map(range, sizes)):
        expected = whole
        for (placement, size), index in zip(axes, place, strict=True):
            expected = pieces(expected, placement, size)[index]
        part = part_at(shape, sizes, cuts, place)
        assert part.shape == tuple(expected.shape)
        found = torch.full(part.shape, -1)
        for box in part.boxes:
            box.within(found).copy_(box.of(whole))
            box.of(seen).add_(1)
        assert torch.equal(found, expected)
        by_rows = torch.full(part.shape, -1)
        for start in range(0, shape[0], 3):
            rows = whole[start : start + 3]
            for box in filter(None, (box.within_rows(start, start + len(rows)) for box in part.boxes)):
                box.within(by_rows).copy_(box.of(rows))
        assert torch.equal(by_rows, expected)
    copies = 1
    for (_, size), cut in zip(axes, cuts, strict=True):
        copies *= size if cut is None else 1
    assert bool((seen == copies).all())


def test_a_scalar_is_one_box_and_a_sum_over_processes_has_no_parts() -> None:
    assert [box.sizes for box in part_at((), (2,), (None,), (1,)).boxes] == [()]
    with pytest.raises(ValueError, match="a sum over processes"):
        cut_of(Partial())
