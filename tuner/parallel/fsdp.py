"""Data parallelism by torch FSDP2: every parameter in equal shards, gathered block by block, and replicas of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from tuner.errors import MachineError
from tuner.model.build import decoder_blocks
from tuner.model.root import FORWARD_METHODS, CausalLM
from tuner.runtime.dist import RankInfo


def shard_size(kind: str, rank_info: RankInfo) -> int:
    """Over how many processes one copy of the model is split: `full`, `hybrid` and `none` of `parallel.shard`.

    Raises MachineError where `hybrid` meets machines with unequal numbers of processes.
    """
    if kind == "none":
        return 1
    if kind == "full":
        return rank_info.world_size
    if rank_info.world_size % rank_info.local_world_size:
        raise MachineError(
            f"parallel.shard: hybrid needs as many processes on every machine; {rank_info.world_size} are not a "
            f"multiple of the {rank_info.local_world_size} here",
            hint="write shard: full",
        )
    return rank_info.local_world_size


def data_mesh(device: str, world_size: int, shard_size: int) -> DeviceMesh:
    """All processes: one axis to shard over or, with fewer than all to a copy, replicas x shards.

    Neighbouring ranks share a copy: launchers number the processes of a machine one after the other.
    """
    if shard_size == world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    names = ("replicate", "shard")
    return init_device_mesh(device, (world_size // shard_size, shard_size), mesh_dim_names=names)


def copies(root: nn.Module) -> int:
    """How many processes hold the same shard of a gradient once it is reduced: 1 without replicas.

    A sum over all processes counts each shard so often. Divided by it, a sum of squares is that of the whole gradient,
    to the last bit where it is a power of two, since all replicas hold the same values.
    """
    sharded = next((p for p in root.parameters() if isinstance(p, DTensor)), None)
    return 1 if sharded is None or sharded.device_mesh.ndim == 1 else sharded.device_mesh.size(0)


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
