"""A sharded model whole on every process for the length of a block, for work of many forwards and no update."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tuner.parallel.expert import SpreadExperts, all_spread
from tuner.parallel.lookup import Lookup, lookups
from tuner.runtime.parts import cuts_of
from tuner.runtime.torch_private import fsdp_groups


def whole_bytes(root: nn.Module) -> int:
    """Bytes that each process needs on its device to hold all that FSDP2 gathers of a model; 0 for a whole one."""
    return sum(_gathered_bytes(p) for p in root.parameters() if isinstance(p, DTensor))


def _gathered_bytes(parameter: DTensor) -> int:
    """Bytes of a parameter without what a tensor group splits of it, which stays so; 0 where nothing else is split.

    Of experts, those that FSDP2 gathers on a process are there in addition to all of them.
    """
    mesh, size = parameter.device_mesh, parameter.numel() * parameter.element_size()
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    split = [axis for axis, cut in enumerate(cuts_of(parameter)) if cut is not None]
    inner = [axis for axis in split if names[axis].endswith("tensor")]
    experts = prod(mesh.size(axis) for axis in split if names[axis].endswith("expert"))
    own = size // experts if experts > 1 else 0
    return 0 if inner == split else size // prod(mesh.size(axis) for axis in inner) + own


@contextmanager
def kept_whole(root: nn.Module) -> Iterator[None]:
    """Within, every process has whole what FSDP2 does not gather: weights of lookups, experts. Collective at first."""
    parts: list[Lookup | SpreadExperts] = [*lookups(root), *all_spread(root)]
    try:
        for one in parts:
            one.keep_whole()
        yield
    finally:
        for one in parts:
            one.whole = None


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Within, every unit stays gathered after its forward; each is gathered once, however many forwards there are.

    Nothing to do for a model that is not sharded. Collective, at both ends; updates are not allowed within.
    """
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in fsdp_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        with kept_whole(root):
            yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        for unit in units:
            unit.reshard()
