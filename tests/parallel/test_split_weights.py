"""FSDP2 over what another axis splits: what it cuts, what of it is refused, its norms, its copies and what is whole."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fixtures.processes import fake_group, run_ranks
from tests.parallel.meshes import STRIDED, mesh_of, placed
from tests.parallel.test_health import flip
from tuner.errors import RecipeError
from tuner.parallel import fsdp
from tuner.parallel.fsdp import dim_to_shard, holders, require_as_declared, squared_norm, sum_whole_gradients
from tuner.parallel.gathered import whole_bytes
from tuner.parallel.health import Copy, first_difference, sums_of
from tuner.parallel.layouts import whole
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.runtime.parts import local
from tuner.runtime.process import Collective, gloo_group


class Layer(nn.Module):
    """A weight of its own, as another axis leaves it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


def split(one: torch.Tensor, placement: Any) -> torch.Tensor:
    """A tensor over the tensor axis of 2 x 2 processes, as it is before FSDP2 has it."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(one, mesh_of((2, 2))["tensor"], [placement], src_data_rank=None)


def cases() -> dict[str, tuple[torch.Tensor, Any, tuple[str, ...]]]:
    """A whole weight, how the tensor axis splits it, and how it lies once FSDP2 has it."""
    from torch.distributed.tensor import Shard

    return {
        "rows": (numbers(8, 6), Shard(0), ("_S(0, 2)", "S(0)")),
        "uneven rows": (numbers(7, 6), Shard(0), ("_S(0, 2)", "S(0)")),
        "columns": (numbers(6, 8), Shard(1), ("S(0)", "S(1)")),
        "fused": (numbers(8, 6), STRIDED(0, 2), ("S(1)", "_S(0, 2)")),
        "experts": (numbers(2, 4, 3), Shard(0), ("S(1)", "S(0)")),
        "bias": (numbers(8), Shard(0), ("_S(0, 2)", "S(0)")),
    }


@pytest.mark.multi
def test_what_fsdp_cuts_lies_as_its_placements_say(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for name, (one, placement, expected) in cases().items():
            layer = Layer(split(one, placement))
            before = layer.weight.to_local().detach().clone()  # type: ignore[operator]
            fsdp._fully_shard(layer, mesh_of((2, 2))["shard"], True)
            assert tuple(map(str, layer.weight.placements)) == expected, name  # type: ignore[arg-type]
            require_as_declared(layer)
            assert torch.equal(whole(layer.weight), one), name
            # What a forward has: this process's part of the tensor group, as it was before it was sharded.
            assert whole_bytes(layer) == one.numel() * 4 // 2, name
            found = fsdp._unsharded(layer.weight)  # type: ignore[arg-type]
            assert torch.equal(local(found), before), name
            layer.unshard()  # type: ignore[operator]
            assert torch.equal(local(layer.weight.detach()), before), name

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.multi
def test_what_would_lie_otherwise_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(RecipeError, match=r"fused projection of shape \[8, 5\], 2 shards cannot share the 5 col"):
            dim_to_shard(nn.Parameter(split(numbers(8, 5), STRIDED(0, 2))), 2)
        with pytest.raises(RecipeError, match="cannot share the rows alone"):
            dim_to_shard(nn.Parameter(split(numbers(8), STRIDED(0, 2))), 2)
        layer = nn.Module()  # as FSDP2 would say that it lies, and it does not
        layer.layers = nn.ModuleList([Layer(placed(numbers(8, 5), (2, 2), (STRIDED(0, 2), STRIDED(0, 2))))])
        with pytest.raises(RecipeError, match=r"^layers.0.weight: 8 rows cannot be shared by 2 x 2 processes"):
            require_as_declared(layer)

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.parametrize(("rows", "right"), [(9, False), (16, True), (20, True)])
def test_uneven_rows_of_which_torch_would_not_know_whose_they_are(rows: int, right: bool) -> None:
    """Nine over two and then four: the fourth shard of the first has none, and torch says that of the second."""
    from torch.distributed.tensor import Shard

    with fake_group(3, 8):
        layer = Layer(placed(numbers(rows, 2), (4, 2), (STRIDED(0, 2), Shard(0))))
        with nullcontext() if right else pytest.raises(RecipeError, match="9 rows cannot be shared by 4 x 2 processes"):
            require_as_declared(layer)


@pytest.mark.multi
def test_norms_count_once_and_whole_gradients_are_summed_over_those_with_the_same_part(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def work(rank: int) -> None:
        mesh = Mesh.of(RankInfo(rank, 4, rank, 4), MeshSpec("full", tensor=2))
        meshes = mesh.device_meshes("cpu")
        assert meshes.data_mesh is not None and meshes.weights is not None and meshes.tensor is not None
        assert meshes.data_mesh.mesh.tolist() == [rank % 2, rank % 2 + 2]
        norm = DTensor.from_local(numbers(3) + 3 * (rank // 2), meshes.weights, [Shard(0)], run_check=False)
        tensors = {1: placed(numbers(8, 6), (2, 2), (STRIDED(0, 2), Shard(0))), 2: norm, 4: numbers(5)}
        assert [holders(one, mesh) for one in tensors.values()] == [1, 2, 4]
        total = squared_norm(list(tensors.values()), mesh)
        torch.distributed.all_reduce(total)
        assert total.item() == pytest.approx(sum(int(whole(one).square().sum()) for one in tensors.values()), 1e-6)

        fsdp.FLAT = 4
        plain, large, none = (nn.Parameter(torch.zeros(shape)) for shape in (3, 6, 2))
        bias = nn.Parameter(split(torch.zeros(4), Shard(0)))
        sharded = nn.Parameter(tensors[1])
        parameters = [plain, large, none, bias, sharded]
        for number, one in enumerate(parameters):
            if one is not none and (one is not plain or rank < 2):
                one.grad = torch.full_like(one, 1.0 + rank + 10 * number)
        sum_whole_gradients(parameters, meshes.data_mesh)
        others = 1 + rank % 2 * 2  # 1 + rank and 1 + the rank of who has the same part
        assert plain.grad is not None and plain.grad.tolist() == [1.0 + rank % 2] * 3
        assert large.grad is not None and large.grad.tolist() == [20.0 + others + 3] * 6
        assert none.grad is None
        assert isinstance(bias.grad, DTensor) and bias.grad.to_local().tolist() == [60.0 + others + 3] * 2
        assert isinstance(sharded.grad, DTensor) and bool((sharded.grad.to_local() == 41 + rank).all())

    assert run_ranks(4, tmp_path, work) == [0] * 4


WRONG = 3


@pytest.mark.multi
def test_a_wrong_bit_of_a_copy_is_found(tmp_path: Path) -> None:
    """A norm that FSDP2 shards, which both processes of a tensor group have, and matrices with copies of each part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    places: dict[str, tuple[int, tuple[int, ...]]] = {"norm": (2, (7,)), "column": (1, (0, 7)), "plain": (0, (3,))}

    def work(rank: int) -> None:
        for name in places:
            check(rank, name)

    def check(rank: int, name: str) -> None:
        ranks = Collective(gloo_group())
        one_axis, part = mesh_of((2, 2))["shard"], numbers(4) + 4 * (rank // 2)
        tensors = {
            "norm": DTensor.from_local(part, one_axis, [Shard(0)], run_check=False),
            "column": placed(numbers(4, 8), (2, 2), (Replicate(), STRIDED(1, 2))),
            "split": placed(numbers(8, 6), (2, 2), (STRIDED(0, 2), Shard(0))),
            "plain": numbers(5),
        }
        copies = [Copy.of(key, one, 4) for key, one in tensors.items()]
        assert [(copy.shards, copy.copies) for copy in copies] == [(2, 2), (2, 2), (4, 1), (1, 4)]
        assert first_difference(copies, sums_of(copies), ranks) is None
        if rank == WRONG:
            flip(local(tensors[name]), 3, 2)
        found = first_difference(copies, sums_of(copies), ranks)
        other, place = places[name]
        assert found is not None
        assert (found.name, found.rank, found.other, found.place) == (name, WRONG, other, place)

    assert run_ranks(4, tmp_path, work) == [0] * 4
