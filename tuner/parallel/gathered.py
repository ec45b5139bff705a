"""A sharded model whole on every process for the length of a block, for work of many forwards and no update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tuner.parallel.lookup import kept_whole
from tuner.runtime.torch_private import fsdp_groups


def whole_bytes(root: nn.Module) -> int:
    """Bytes that each process needs on its device to hold all of a sharded model; 0 for one that is whole already."""
    return sum(p.numel() * p.element_size() for p in root.parameters() if isinstance(p, DTensor))


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
