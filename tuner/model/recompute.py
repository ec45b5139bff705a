"""Activation memory: decoder layers whose forward is run again in the backward pass instead of being remembered.

``full`` keeps a layer's input alone (Chen et al. 2016, https://arxiv.org/abs/1604.06174). ``selective`` also keeps the
results of matrix products and of attention kernels, which cost the time, and makes the rest again: norms, activations,
rotations, casts (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Gradients are the plain model's: the same
operations on the same numbers, with the same random numbers where there is dropout.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.runtime.torch_private import schema

Level = Literal["selective", "full"]
_KEPT = {
    "tuner::attend_documents",
    "tuner::native_attention",
    "torch_attn::_varlen_attn",
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
}
"""Not ``bmm``: where attention is made of batched products, its scores are what fills the memory."""


def apply_recompute(root: CausalLM, level: Level, n_layers: int | None = None) -> None:
    """Recompute ``n_layers`` decoder layers, evenly spread, or all of them, in place; before sharding.

    The checkpoint lies inside a layer's forward, so that hooks around it, such as FSDP2's, run once.
    """
    # Random numbers are put back for the second run: a generator's state is read on the CPU, without a wait.
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    if level == "selective":
        run = partial(run, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    blocks = decoder_blocks(root.model)
    for index in spread(len(blocks), len(blocks) if n_layers is None else n_layers):
        _wrap(blocks[index], run)


def spread(n_layers: int, chosen: int) -> list[int]:
    """Indices of ``chosen`` of the layers, evenly spread; the last layer, whose turn comes first, is chosen last."""
    return [i * n_layers // chosen for i in range(chosen)]


def _wrap(block: nn.Module, run: Callable[..., Any]) -> None:
    forward = block.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return run(forward, *args, **kwargs)

    block.forward = recomputed


def _policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products and attention. What draws random numbers is made again, so that every draw is repeated."""
    declared = schema(operation)
    if declared.name not in _KEPT:
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = dict(zip((argument.name for argument in declared.arguments), args, strict=False)) | kwargs
    if given.get("dropout_p", 0.0) > 0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE
