"""Data parallelism by torch FSDP2: every parameter in equal shards, gathered block by block, and replicas of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from tuner.model.build import decoder_blocks
from tuner.model.root import FORWARD_METHODS, CausalLM


def shard(root: CausalLM, mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    """Shard a model on the meta device, in place: each decoder block a unit, the rest in the root's unit.

    With ``reshard_after_forward`` a block's weights are gathered again for its backward pass. Gradients are summed, not
    averaged, over processes: the loss is already divided by the global count. No mixed precision policy is set, since
    autocast inside gives one meaning of bf16 at every world size.
    """
    for block in decoder_blocks(root.model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    # Embeddings and head are what the backward pass begins with: they stay gathered between the two.
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    for method in FORWARD_METHODS:
        register_fsdp_forward_method(root, method)


def materialise(root: CausalLM, source: CausalLM | None, device: torch.device) -> None:
    """Give a sharded meta model its storage and the values of rank 0's ``source``, one tensor at a time.

    Buffers are copied too: non-persistent ones (rotary frequencies) are in no file and hold garbage after meta.
    Collective; ``source`` is None on the other ranks. Host memory beyond the shards: one whole tensor on them.
    """
    root.to_empty(device=device)
    values = {} if source is None else dict(_tensors(source))
    with torch.no_grad():
        for name, target in _tensors(root):
            if source is None:
                whole = torch.empty(target.shape, dtype=target.dtype, device=device)
            else:
                whole = values[name].to(device)
            if whole.dtype != target.dtype:
                raise RuntimeError(f"{name} is {whole.dtype} at the source and {target.dtype} in the sharded model")
            if isinstance(target, DTensor):
                placed = distribute_tensor(whole.contiguous(), target.device_mesh, target.placements)
                target.to_local().copy_(placed.to_local())
            else:
                dist.broadcast(whole, src=0)
                target.copy_(whole)


def sync_gradients(root: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over processes; off until a step's last microbatch."""
    if isinstance(root, FSDPModule):
        root.set_requires_gradient_sync(sync)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(root: CausalLM) -> list[tuple[str, torch.Tensor]]:
    return [*root.named_parameters(), *root.named_buffers()]
