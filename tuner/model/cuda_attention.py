"""Which kernel computes attention inside documents on a CUDA device, and why; docs/models.md has the table."""

from functools import cache
from typing import Literal

import torch

from tuner.model import flash4_attention as flash4
from tuner.model import flash_attention as flash
from tuner.model import triton_attention as by_triton
from tuner.model.blocked_attention import attend_in_blocks
from tuner.model.documents import Documents
from tuner.runtime.device import AMPERE, generation, is_traced, triton_problem

Way = Literal["flash4", "flash", "triton", "blocks"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def way_on(  # noqa: PLR0917 - what all of them depend on
    index: int | None, dtype: torch.dtype, widths: tuple[int, int], is_grouped: bool, is_capped: bool,
    has_sinks: bool = False, has_window: bool = False,
) -> Way:
    """Whose kernel attends on CUDA device ``index``, to compilers a constant; keys and values have these widths.

    Heads are grouped where several of queries share one of keys.
    """
    major = generation(index)
    is_served = dtype in flash4.TYPES and not flash4.problem(major, *widths, is_grouped, is_capped, has_window)
    if is_served and flash4.is_taken():
        return "flash4"
    return way_and_reason(major, dtype, max(widths), is_capped, has_sinks=has_sinks)[0]


def way_and_reason(  # noqa: PLR0917 - what all of them depend on
    device_generation: int, dtype: torch.dtype, widest: int, is_capped: bool, is_here: bool = True,
    has_sinks: bool = False,
) -> tuple[Way, str]:
    """The kernel for a generation of devices, in a word and in words that say why, without a package for attention.

    For a device that is not in this machine, everything is assumed to be installed.
    """
    if device_generation < AMPERE:
        return "blocks", "blocked matrix products, several times slower: this device is below compute capability 8.0"
    takes_no_sinks = has_sinks and not flash.TAKES_TENSOR  # torch would take its own output back for the gradient
    if dtype in flash.TYPES and widest <= flash.WIDEST and not is_capped and not takes_no_sinks:
        return "flash", "flash attention"
    why = "scores have a soft cap" if is_capped else f"heads have {widest} channels"
    if takes_no_sinks and not is_capped and widest <= flash.WIDEST:
        why = "attention has sinks, and this torch keeps parts of its flash attention private"
    if dtype not in flash.TYPES:
        why = f"heads are {str(dtype).removeprefix('torch.')}"
    problem = None if is_traced() or not is_here else _triton_problem()
    if widest > by_triton.WIDEST.get(dtype, 0):
        problem = f"tuner's Triton kernel takes {by_triton.WIDEST.get(dtype, 0)} channels"
    if problem is not None:
        return "blocks", f"blocked matrix products, several times slower: {why}, and {problem}"
    return "triton", f"tuner's Triton kernel: {why}"


_triton_problem = cache(triton_problem)


def attend(  # noqa: PLR0913, PLR0917 - what all kernels are given
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, window: int, scale: float,
    cap: float, sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention ``[T, heads, d_value]`` inside documents of query ``[heads, T, d]`` to key and value, by the best way.

    A query sees ``window`` tokens, all before it for 0; a ``cap`` above 0 bends scores s to cap·tanh(s/cap). A ``sink``
    for each head, float32 ``[heads]``, is one more score of each query, whose value is zero.
    """
    widths, is_grouped = (query.shape[-1], value.shape[-1]), len(query) != len(key)
    way = way_on(query.device.index, query.dtype, widths, is_grouped, cap > 0, sink is not None, window > 0)
    bounds, longest, output = documents.device, documents.longest, query
    if way == "flash4":
        output, _ = flash4.flash_attention_4(query, key, value, bounds, longest, window, scale, cap, sink)
    elif way == "flash" and flash.TAKES_TENSOR:
        output, _ = flash.flash_attention(query, key, value, bounds, longest, window, scale, sink)
    elif way == "flash":
        output = flash.with_number(query, key, value, documents, window, scale)
    elif way == "triton":
        output, _ = by_triton.triton_attention(query, key, value, bounds, longest, window, scale, cap, sink)
    else:
        output = attend_in_blocks(query, key, value, documents, window, scale, cap, sink)
    return output
