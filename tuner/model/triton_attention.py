"""Attention inside documents on CUDA where flash attention does not serve: one opaque operation over Triton kernels.

That is for scores with a soft cap, heads wider than 256, and float32. Where documents lie, and how long the longest
is, are data to the operation: nothing waits for the device, and one compiled layer serves every packing.
"""

from typing import Any

import torch

from tuner.model.attention_ops import LN_2, dense, new_gradients, new_results, register_backward, with_sinks

WIDEST = {torch.bfloat16: 512, torch.float16: 512, torch.float32: 256}
"""The widest head of each type that the kernels take: blocks of it fit the shared memory of every GPU since sm_80."""


def launch(name: str, tensors: dict[str, torch.Tensor], longest: torch.Tensor, **numbers: Any) -> None:
    """Run one of the launching functions of the kernels, which need Triton: predictions do without."""
    from tuner.model import triton_kernels

    getattr(triton_kernels, name)(tensors, int(longest), **numbers)


@torch.library.custom_op("tuner::triton_attention", mutates_args=())
def triton_attention(  # noqa: PLR0913, PLR0917 - an operation's arguments are tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: torch.Tensor,
    window: int,
    scale: float,
    cap: float,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[T, heads, d_value]`` of query ``[heads, T, d]`` to key ``[kv_heads, T, d]`` and value.

    All are of one type of :data:`WIDEST`. ``bounds`` int32 ``[documents + 1]`` lies on their device, ``longest`` int32
    ``[1]`` on the CPU: no document has more tokens. A query sees ``window`` tokens, all before it for 0. A ``cap``
    above 0 bends scores s to cap·tanh(s/cap). A ``sink`` for each head, float32 ``[heads]``, is one more score of each
    query, whose value is zero. The second result, float32 ``[heads, T]``, is for the backward pass:
    the binary logarithm of the normaliser.
    """
    query, key, value = dense(query, key, value)
    output, normaliser = new_results(query, key, value)
    tensors = {"query": query, "key": key, "value": value, "bounds": bounds}
    tensors |= {"output": output, "normaliser": normaliser}
    launch("launch_forward", tensors, longest, WINDOW=window, SCALE=scale, CAP=cap)
    if sink is None:
        return output, normaliser
    return with_sinks(output, normaliser, sink, LN_2)


triton_attention.register_fake(new_results)


@torch.library.custom_op("tuner::triton_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    bounds: torch.Tensor,
    longest: torch.Tensor,
    window: int,
    scale: float,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; tokens are their outer dimension in memory, as projections want them."""
    query, key, value = dense(query, key, value)
    grads = new_gradients(upstream, query, key, value)
    tensors = {"query": query, "key": key, "value": value, "bounds": bounds, "output": output.contiguous()}
    tensors |= {"normaliser": normaliser, "upstream": upstream.to(value.dtype).contiguous()}
    tensors |= dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True))
    launch("launch_backward", tensors, longest, WINDOW=window, SCALE=scale, CAP=cap)
    return grads


_backward.register_fake(new_gradients)
register_backward(triton_attention, _backward, LN_2)
