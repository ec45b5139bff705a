"""How processes lie along axes: who computes which rows, who holds which shard, and as torch counts them."""

import pytest

from tests.fixtures import tables
from tests.fixtures.processes import fake_group
from tuner.errors import MachineError
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo


def laid_out(rank: int, world_size: int, local: int, shard: str) -> Mesh:
    return Mesh.of(RankInfo(rank, world_size, rank % local, local), MeshSpec(shard))


@pytest.mark.parametrize(
    ("world_size", "local", "shard", "axes", "copies"), tables.cases(__file__, "every_process_computes_its_own_rows")
)
def test_every_process_computes_its_own_rows(
    world_size: int, local: int, shard: str, axes: dict[str, int], copies: int
) -> None:
    meshes = [laid_out(rank, world_size, local, shard) for rank in range(world_size)]
    assert all(dict(mesh.axes) == axes for mesh in meshes)
    assert {(mesh.size, mesh.data_size, mesh.copies) for mesh in meshes} == {(world_size, world_size, copies)}
    assert [mesh.data_rank for mesh in meshes] == list(range(world_size))
    for mesh in meshes:
        with fake_group(mesh.rank, world_size):
            devices = mesh.device_meshes("cpu").weights
            if "shard" not in axes:
                assert devices is None
                continue
            assert devices is not None and devices.mesh_dim_names == tuple(axes)
            assert [*(devices.get_coordinate() or ())] == [mesh.index(name) for name in axes]


def test_processes_along_another_axis_share_their_rows() -> None:
    meshes = [Mesh({"replicate": 2, "shard": 2, "tensor": 2}, rank) for rank in range(8)]
    assert [mesh.data_rank for mesh in meshes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {(mesh.size, mesh.data_size, mesh.copies) for mesh in meshes} == {(8, 4, 2)}
    assert [mesh.index("tensor") for mesh in meshes] == [0, 1] * 4


@pytest.mark.parametrize("shard", ["full", "hybrid", "none"])
def test_a_single_process_has_no_mesh_of_devices(shard: str) -> None:
    mesh = laid_out(0, 1, 1, shard)
    assert (mesh.size, mesh.data_size, mesh.data_rank, mesh.copies) == (1, 1, 0, 1)
    assert mesh.device_meshes("cpu").weights is None


def test_hybrid_wants_as_many_processes_on_every_machine() -> None:
    with pytest.raises(MachineError, match="5 are not a multiple of the 2 here"):
        laid_out(0, 5, 2, "hybrid")


@pytest.mark.parametrize(
    ("spec", "axes", "data", "weights", "expert_weights"),
    [
        (MeshSpec("full", tensor=2), {"shard": 2, "tensor": 2}, [0, 0, 1, 1], ("shard",), None),
        (MeshSpec("full", tensor=4), {"tensor": 4}, [0, 0, 0, 0], None, None),
        (MeshSpec("full", sequence=2), {"shard": 4}, [0, 0, 1, 1], ("shard",), None),
        (MeshSpec("none", sequence=4), {"replicate": 4}, [0, 0, 0, 0], None, None),
        (MeshSpec("full", tensor=2, sequence=2), {"shard": 2, "tensor": 2}, [0, 0, 0, 0], ("shard",), None),
        (MeshSpec("hybrid", replicas=2), {"replicate": 2, "shard": 2}, [0, 1, 2, 3], ("replicate", "shard"), None),
        (MeshSpec("hybrid", replicas=4), {"replicate": 4}, [0, 1, 2, 3], None, None),
        (MeshSpec("full", on_host=True), {"shard": 4}, [0, 1, 2, 3], ("shard",), None),
        (MeshSpec("none", on_host=True), {"replicate": 4, "shard": 1}, [0, 1, 2, 3], ("replicate", "shard"), None),
        (MeshSpec("full", expert=2), {"shard": 4}, [0, 1, 2, 3], ("shard",), ("expert_shard",)),
        (MeshSpec("full", expert=4), {"shard": 4}, [0, 1, 2, 3], ("shard",), ("expert_shard",)),
    ],
)
def test_groups_of_four_processes(
    spec: MeshSpec, axes: dict[str, int], data: list[int], weights: tuple[str, ...] | None, expert_weights: object
) -> None:
    meshes = [Mesh.of(RankInfo(rank, 4, rank, 4), spec) for rank in range(4)]
    assert {tuple(mesh.axes.items()) for mesh in meshes} == {tuple(axes.items())}
    assert [mesh.data_rank for mesh in meshes] == data
    assert {mesh.data_size * mesh.row_holders for mesh in meshes} == {4}
    for mesh in meshes:
        with fake_group(mesh.rank, 4):
            found = mesh.device_meshes("cpu")
            assert (found.weights and found.weights.mesh_dim_names) == weights
            assert (found.expert_weights and found.expert_weights.mesh_dim_names) == expert_weights
            sizes = {name: each and each.size() for name, each in vars(found).items()}
            for name in ("tensor", "sequence", "expert"):
                size = getattr(spec, name)
                assert sizes[name] == (size if size > 1 else None)
            if found.sequence is not None:  # neighbours, but for those of one tensor group
                own = found.sequence.mesh.tolist()
                assert mesh.rank in own and own == list(range(own[0], own[0] + len(own) * spec.tensor, spec.tensor))


@pytest.mark.parametrize(
    ("processes", "spec", "said"),
    [
        (3, MeshSpec("full", tensor=2), "parallel.tensor: 2 does not divide the number of processes, 3"),
        (1, MeshSpec("full", sequence=2), "parallel.sequence: 2 does not divide the number of processes, 1"),
        (4, MeshSpec("full", tensor=2, sequence=4), "parallel.sequence: 4 times parallel.tensor: 2 does not divide"),
        (6, MeshSpec("hybrid", replicas=4), "parallel.replicas: 4 copies cannot have 6 processes between them"),
        (6, MeshSpec("full", expert=4), "parallel.expert: 4 does not divide the number of processes, 6"),
    ],
)
def test_processes_that_do_not_divide_are_refused(processes: int, spec: MeshSpec, said: str) -> None:
    with pytest.raises(MachineError, match=said):
        Mesh.of(RankInfo(0, processes, 0, processes), spec)


def test_a_group_stays_inside_one_copy_of_the_model() -> None:
    with pytest.raises(MachineError, match="parallel.sequence: 4 does not divide the 2 processes that hold one copy"):
        Mesh.of(RankInfo(0, 4, 0, 2), MeshSpec("hybrid", sequence=4))
