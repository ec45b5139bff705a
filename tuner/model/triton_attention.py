"""Attention inside documents on CUDA where flash attention does not serve: one opaque operation over Triton kernels.

That is for scores with a soft cap, heads wider than 256, and float32. Where documents lie, and how long the longest
is, are data to the operation: nothing waits for the device, and one compiled layer serves every packing.
"""

from collections.abc import Sequence

import torch

from tuner.model import attention_ops as ops

WIDEST = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 256}
"""The widest head of each type that the kernels take: blocks of it fit the shared memory of every GPU since sm_80."""


def launch(name: str, tensors: dict[str, torch.Tensor], asked: ops.Scope) -> None:
    """Run one of the launching functions of the kernels, which need Triton: predictions do without."""
    from tuner.model import triton_kernels

    numbers = {"WINDOW": asked.window, "SCALE": asked.scale, "CAP": asked.cap}
    getattr(triton_kernels, name)(tensors, int(asked.longest), **numbers)


def _output(heads: ops.QueryKeyValue, asked: ops.Scope, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    given = ops.dense(*heads)
    output, normaliser = ops.new_results(*given)
    launch("launch_forward", _named(given, asked) | {"output": output, "normaliser": normaliser}, asked)
    return (output, normaliser) if sink is None else ops.with_sinks(output, normaliser, sink, ops.LN_2)


def _gradients(upstream: torch.Tensor, heads: ops.QueryKeyValue, made: ops.Results, asked: ops.Scope) -> ops.Gradients:
    given = ops.dense(*heads)
    grads = ops.new_gradients(upstream, *given)
    tensors = _named(given, asked) | {"output": made.output.contiguous(), "normaliser": made.normaliser}
    tensors["upstream"] = upstream.to(heads.value.dtype).contiguous()
    tensors |= {f"grad_{name}": grad for name, grad in zip(ops.NAMES, grads, strict=True)}
    launch("launch_backward", tensors, asked)
    return grads


def _named(heads: Sequence[torch.Tensor], asked: ops.Scope) -> dict[str, torch.Tensor]:
    return dict(zip(ops.NAMES, heads, strict=True)) | {"bounds": asked.bounds}


_GIVEN = "Tensor bounds, Tensor longest, int window, float scale, float cap"
triton_attention, _backward = ops.attention_operation("triton_attention", _GIVEN, _output, _gradients, ops.LN_2)
