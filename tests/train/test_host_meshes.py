"""States on the host as tensors of a checkpoint, where the parameters are shards on GPUs that need not be here."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.fixtures.processes import fake_group
from tuner.runtime.parts import local
from tuner.train.optimizer import _as_sharded


@pytest.fixture
def group() -> Iterator[None]:
    with fake_group(3, 4):
        yield


@pytest.mark.parametrize(("axes", "names"), [((4,), ("shard",)), ((2, 2), ("replicate", "shard"))])
def test_they_lie_over_the_same_processes_and_stay_where_they_are(
    axes: tuple[int, ...], names: tuple[str, ...], group: None
) -> None:
    mesh, placements = init_device_mesh("cuda", axes, mesh_dim_names=names), [Replicate(), Shard(0)][-len(axes) :]
    part = torch.empty(3, 5, device="meta")
    parameter = DTensor.from_local(part, mesh, placements, run_check=False, shape=(3 * axes[-1], 5), stride=(5, 1))
    moment = torch.ones(3, 5)
    found = _as_sharded("exp_avg", moment, parameter)
    assert isinstance(found, DTensor) and found.shape == parameter.shape and found.placements == parameter.placements
    assert local(found).data_ptr() == moment.data_ptr()
    there = found.device_mesh
    assert (there.device_type, there.mesh_dim_names) == ("cpu", names) and torch.equal(there.mesh, mesh.mesh)
    assert there.get_coordinate() == mesh.get_coordinate()
    assert [there.get_group(axis) for axis in names] == [mesh.get_group(axis) for axis in names]
    again = _as_sharded("exp_avg_sq", moment, parameter)
    assert isinstance(again, DTensor) and again.device_mesh is there
