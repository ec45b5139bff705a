"""How processes lie along axes: who computes which rows, who holds which shard, and as torch counts them."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tuner.errors import MachineError
from tuner.parallel.mesh import Mesh
from tuner.runtime.dist import RankInfo


def laid_out(rank: int, world_size: int, local: int, shard: str) -> Mesh:
    return Mesh.of(RankInfo(rank, world_size, rank % local, local), shard)


@pytest.mark.parametrize(
    ("world_size", "local", "shard", "axes", "copies"),
    [
        (4, 4, "full", {"shard": 4}, 1),
        (4, 2, "full", {"shard": 4}, 1),
        (4, 2, "hybrid", {"replicate": 2, "shard": 2}, 2),
        (4, 4, "hybrid", {"shard": 4}, 1),
        (4, 4, "none", {"replicate": 4}, 4),
        (4, 1, "hybrid", {"replicate": 4}, 4),
    ],
)
def test_every_process_computes_its_own_rows(
    world_size: int, local: int, shard: str, axes: dict[str, int], copies: int
) -> None:
    meshes = [laid_out(rank, world_size, local, shard) for rank in range(world_size)]
    assert all(dict(mesh.axes) == axes for mesh in meshes)
    assert {(mesh.size, mesh.data_size, mesh.copies) for mesh in meshes} == {(world_size, world_size, copies)}
    assert [mesh.data_rank for mesh in meshes] == list(range(world_size))
    for mesh in meshes:
        dist.init_process_group("fake", store=FakeStore(), rank=mesh.rank, world_size=world_size)
        try:
            devices = mesh.device_mesh("cpu")
            if "shard" not in axes:
                assert devices is None
                continue
            assert devices is not None and devices.mesh_dim_names == tuple(axes)
            assert [*(devices.get_coordinate() or ())] == [mesh.index(name) for name in axes]
        finally:
            dist.destroy_process_group()


def test_processes_along_another_axis_share_their_rows() -> None:
    meshes = [Mesh({"replicate": 2, "shard": 2, "tensor": 2}, rank) for rank in range(8)]
    assert [mesh.data_rank for mesh in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(mesh.size, mesh.data_size, mesh.copies) for mesh in meshes} == {(8, 4, 2)}
    assert [mesh.index("tensor") for mesh in meshes] == [0, 1] * 4


@pytest.mark.parametrize("shard", ["full", "hybrid", "none"])
def test_a_single_process_has_no_mesh_of_devices(shard: str) -> None:
    mesh = laid_out(0, 1, 1, shard)
    assert (mesh.size, mesh.data_size, mesh.data_rank, mesh.copies) == (1, 1, 0, 1)
    assert mesh.device_mesh("cpu") is None


def test_hybrid_wants_as_many_processes_on_every_machine() -> None:
    with pytest.raises(MachineError, match="5 are not a multiple of the 2 here"):
        laid_out(0, 5, 2, "hybrid")
