"""Made-up tensors over the processes of a test, placed in any way that tensor parallelism and FSDP2 place them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tuner.runtime.parts import part_of

NAMES = {1: ("shard",), 2: ("shard", "tensor"), 3: ("replicate", "shard", "tensor")}
_meshes: dict[Any, DeviceMesh] = {}


def cut(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This process's part of a whole tensor where it lies over the processes as ``like`` does."""
    part = part_of(like)
    found = whole.new_empty(part.shape)
    for box in part.boxes:
        box.within(found).copy_(box.of(whole))
    return found


def STRIDED(dim: int, parts: int) -> Any:  # noqa: N802 - a placement
    """A strided placement, which torch has under a private name."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=parts)


def mesh_of(axes: Sequence[int]) -> DeviceMesh:
    """A mesh with axes of these sizes, made once in a process for each world.

    A world is kept with its meshes: the next one would have its identity, and meshes of groups that are no more.
    """
    key = tuple(axes), torch.distributed.group.WORLD
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", tuple(axes), mesh_dim_names=NAMES[len(axes)])
    return _meshes[key]


def placed(whole: torch.Tensor, axes: Sequence[int], placements: Sequence[Any]) -> DTensor:
    """This process's part of a tensor that all processes have whole."""
    mesh = mesh_of(axes)
    empty = torch.empty(whole.shape, device="meta")
    like = DTensor.from_local(
        empty, mesh, tuple(placements), run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
    )
    return DTensor.from_local(
        cut(whole, like), mesh, tuple(placements), run_check=False, shape=whole.shape, stride=empty.stride()
    )
