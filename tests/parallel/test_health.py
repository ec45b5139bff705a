"""Copies on several processes: any wrong bit is found, with the rank, the tensor and the place; wrong products and
wrong collectives are named.
"""

from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from tests.fixtures.processes import run_ranks
from tuner.parallel import health
from tuner.parallel.health import Copy, KnownProducts, first_difference, sums_of, wrong_collective
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective, gloo_group

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64)


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype)


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of a tensor's element, in place."""
    raw = tensor.detach().view(-1).view(torch.uint8)
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 40), st.data())
def test_every_bit_counts_and_every_place(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    before = drawn(size, dtype, data.draw(st.integers(0, 5)))
    after = before.clone()
    flip(after, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, dtype.itemsize * 8 - 1)))
    one, two = (Copy.of("x", tensor, 2).sum & (1 << 62) - 1 for tensor in (before, after))
    assert int(one) != int(two)


def test_sums_go_by_places_and_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHUNK", 4)
    tensor = torch.arange(1.0, 11.0)
    swapped = tensor[[1, 0, *range(2, 10)]]
    chunks_swapped = tensor[[4, 5, 6, 7, 0, 1, 2, 3, 8, 9]]
    assert len(health.chunk_sums(tensor)) == 3
    assert len({int(Copy.of("x", one, 2).sum) for one in (tensor, swapped, chunks_swapped)}) == 3


def test_a_part_that_lies_at_an_odd_place_of_a_storage() -> None:
    whole = drawn(9, torch.bfloat16)
    assert torch.equal(health.words_of(whole[1:]), health.words_of(whole[1:].clone()))
    assert int(Copy.of("x", torch.zeros(0), 2).sum) == 0


WRONG = 3
PLACES: dict[str, tuple[int, ...]] = {"whole": (4, 2), "sharded": (5, 1), "scalar": ()}
"""Where the wrong rank of 2 x 2 has another bit: rows 4 to 6 of ``sharded`` are its own."""


@pytest.mark.multi
def test_the_rank_and_the_place_are_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        health.CHUNK = 8
        mesh = Mesh.of(RankInfo(rank, 4, rank % 2, 2), MeshSpec("hybrid")).device_meshes("cpu").weights
        assert mesh is not None
        for dtype, name in product((torch.float32, torch.bfloat16), PLACES):
            check(rank, mesh, dtype, name)

    def check(rank: int, mesh: DeviceMesh, dtype: torch.dtype, name: str) -> None:
        place = PLACES[name]
        ranks = Collective(gloo_group())
        whole = torch.arange(21.0).view(7, 3).to(dtype)
        from torch.distributed.tensor import Replicate, Shard

        sharded = distribute_tensor(whole.clone(), mesh, (Replicate(), Shard(0)))
        tensors = {"whole": whole.clone(), "scalar": torch.tensor(1.0, dtype=dtype), "sharded": sharded}
        copies = [Copy.of(name, tensor, 4) for name, tensor in tensors.items()]
        assert [(copy.shards, copy.copies) for copy in copies] == [(1, 4), (1, 4), (2, 2)]
        assert first_difference(copies, sums_of(copies), ranks) is None
        assert first_difference([], [], ranks) is None
        tensors["whole"][0, 0] = tensors["whole"][0, 1] = torch.nan  # the same bits everywhere are no difference
        assert first_difference(copies, sums_of(copies), ranks) is None
        if rank == WRONG:
            part = sharded.to_local() if name == "sharded" else tensors[name]
            row = (place[0] - 4 if name == "sharded" else place[0]) if place else 0
            flip(part, row * 3 + place[1] if place else 0, 3)
        found = first_difference(copies, sums_of(copies), ranks)
        assert found is not None
        assert (found.name, found.rank, found.place, found.tensors) == (name, WRONG, place, (name,))
        assert found.other == (1 if name == "sharded" else 0)
        assert ("either may be" in str(found)) == (name == "sharded")
        assert str(found).startswith(f"rank 3 has another {name} than rank {found.other}: first at {list(place)}, ")

    assert run_ranks(4, tmp_path, work) == [0] * 4


CPU = torch.device("cpu")
AUTOCASTS: dict[str, Any] = {
    "fp32": nullcontext,
    "bf16": partial(torch.autocast, "cpu", torch.bfloat16),
    "fp16": partial(torch.autocast, "cpu", torch.float16),
}


@pytest.mark.parametrize("precision", AUTOCASTS)
def test_products_of_integers_are_exact_in_every_type(precision: str) -> None:
    assert KnownProducts(CPU, AUTOCASTS[precision]).problem() is None


def test_what_a_device_computes_wrongly_is_named() -> None:
    products = KnownProducts(CPU, nullcontext)
    products._whole[0][3] += 1  # as a device would that multiplies by something else
    row = int(products._whole[1].sum(0).nonzero()[0])
    assert str(products.problem()).startswith("a product of matrices is wrong: ")
    assert str(products.problem()).endswith(f"at [3, {row}]")
    products = KnownProducts(CPU, nullcontext)
    products._drawn[0][0, 0] += 1e-6
    assert products.problem() == "a product of matrices is not what it was when the launch began"


@pytest.mark.multi
@pytest.mark.parametrize("fault", ["none", "all_reduce", "gather", "reduce_scatter"])
def test_collectives_that_carry_something_else_are_named(fault: str, tmp_path: Path) -> None:
    expected = {
        "none": None,
        "all_reduce": "an all-reduce of known numbers gave others",
        "gather": "an all-gather brought other numbers than rank 1 sent",
        "reduce_scatter": "a reduce-scatter of known numbers gave others",
    }

    def work(rank: int) -> None:
        from tuner.parallel import health

        ranks = Collective(gloo_group())
        if rank == 0 and fault == "all_reduce":
            real = dist.all_reduce

            def wrong_sum(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                done = real(tensor, *args, **kwargs)
                tensor[5] += 1
                return done

            dist.all_reduce = wrong_sum
        elif rank == 0 and fault != "none":
            name = "gather_parts" if fault == "gather" else "reduce_scatter_parts"
            real_parts = getattr(health, name)

            def wrong_parts(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
                real_parts(whole, own, group)
                whole[-1, 7] += 1

            setattr(health, name, wrong_parts)
        assert wrong_collective(CPU, ranks) == (expected[fault] if rank == 0 else None)

    assert run_ranks(2, tmp_path, work) == [0, 0]
