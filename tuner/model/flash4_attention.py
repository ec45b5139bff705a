"""Flash attention 4 inside documents, on Hopper and Blackwell: the package `flash-attn-4` as one opaque operation.

Torch has it take the place of its own attention in the whole process, and for Blackwell alone. Called here it serves
compute capability 9.x to 12.x, and what torch's own does not take: soft caps (Gemma 2), and sinks (gpt-oss) without a
pass of their own. Its kernels are written in Python and compiled at their first call, 10 s for forward and backward;
:func:`keep_kernels` has it keep them. What it takes follows from the asserts of its backward pass, version 4.0.0b36;
`tools/attention_campaign.py flash4` compiles every call that is made here, without a device.
"""

import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tuner.model.attention_ops import Gradients, QueryKeyValue, Results, Scope, attention_operation, with_sinks
from tuner.model.flash_attention import narrow, ungrouped, wide
from tuner.runtime.device import generation
from tuner.runtime.torch_private import Need, private_attribute

MODULE = "flash_attn.cute.interface"
TYPES = (torch.bfloat16, torch.float16)
_WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}
"""Channels of the widest head by the major number of the compute capability, where keys and values have as many."""
_BLACKWELLS_WIDE = 256
"""The one width above 128 for which data centres' Blackwell has a kernel; its backward takes no caps, no windows."""
WITHOUT_SINKS = (12,)
"""Whose kernel has none: they are put into its result (:func:`.attention_ops.with_sinks`)."""
_LATENT = (192, 128)
"""Widths of keys and values that need not be made one, where each head has keys of its own (DeepSeek)."""
_MULTIPLE = 8
_LEAST = 256
"""The longest document that is said, at least. Where all fit a block it would compile other kernels, amid training."""
_NEED = Need("attention by flash attention 4", "without the package the second computes it")
_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"


def widths(major: int, width: int, value_width: int, is_grouped: bool) -> tuple[int, int] | None:
    """Channels of keys and of values that the kernel is given for such heads, the rest zeros; None: it takes none."""
    if (width, value_width) == _LATENT and not is_grouped and major in (9, 10, 11):
        return _LATENT
    widest = -(-max(width, value_width) // _MULTIPLE) * _MULTIPLE
    if widest <= _WIDEST.get(major, 0):
        return widest, widest
    return (_BLACKWELLS_WIDE, _BLACKWELLS_WIDE) if major in (10, 11) and widest <= _BLACKWELLS_WIDE else None


def problem(  # noqa: PLR0917 - what all of them depend on
    major: int, width: int, value_width: int, is_grouped: bool, is_capped: bool, has_window: bool = False
) -> str | None:
    """Why heads in bf16 are not computed by it on a device of this compute capability, in words; None where they are.

    Sinks are taken wherever heads are: neither pass needs any of the kernel's own (:mod:`.attention_ops`).
    """
    given = widths(major, width, value_width, is_grouped)
    if major not in _WIDEST:
        return "it is for compute capability 9.x to 12.x"
    if given is None:
        return f"it takes no heads of {max(width, value_width)} channels here"
    if (is_capped or has_window) and major in (10, 11) and given == (_BLACKWELLS_WIDE, _BLACKWELLS_WIDE):
        return f"it takes no {'soft cap' if is_capped else 'window'} with heads of {given[0]} channels here"
    if torch.are_deterministic_algorithms_enabled() and major == 12:
        return "its backward pass is not deterministic here"
    return None


def keep_kernels(directory: Path) -> None:
    """Have what is compiled kept here for later processes: to be called before the package is loaded."""
    os.environ.setdefault(f"{_CACHE}_ENABLED", "1")
    os.environ.setdefault(f"{_CACHE}_DIR", str(directory))


_taken_now: list[bool] = [False]


def take(wanted: bool) -> None:
    """Have attention of this process be computed by it wherever it takes the heads, or no longer."""
    _taken_now[0] = wanted


def is_taken() -> bool:
    """Whether it is."""
    return _taken_now[0]


@cache
def _package() -> Any:
    return importlib.import_module(MODULE)


def _output(heads: QueryKeyValue, asked: Scope, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError for what the kernel does not take."""
    given = _taken(heads)
    own = None if generation(heads.query.device.index) in WITHOUT_SINKS else sink
    # Caps and sinks are parts of the kernel: one without the other is another program, compiled at its first call.
    output, normaliser, *_ = private_attribute(_package(), "_flash_attn_fwd", _NEED)(
        *given, softcap=asked.cap or None, learnable_sink=own, return_lse=True, **_options(asked)
    )
    output = narrow(output, heads.value.shape[2])
    return (output, normaliser) if sink is None or own is not None else with_sinks(output, normaliser, sink)


def _gradients(upstream: torch.Tensor, heads: QueryKeyValue, made: Results, asked: Scope) -> Gradients:
    given = _taken(heads)
    width = given.value.shape[2]
    # A query's gradient is accumulated in the order in which blocks finish, unless it is to be the same twice.
    grads = private_attribute(_package(), "_flash_attn_bwd", _NEED)(
        *given, wide(made.output, width), wide(upstream.to(heads.value.dtype), width).contiguous(),
        made.normaliser.contiguous(), softcap=asked.cap, deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(asked),
    )
    found = [ungrouped(grad, tensor) for grad, tensor in zip(grads[:3], heads, strict=True)]
    return found[0], found[1], found[2]


def _taken(given: QueryKeyValue) -> QueryKeyValue:
    """Heads ``[n, T, d]`` as the kernel takes them: ``[T, n, width]``, filled up with zeros. Raises ValueError."""
    query, key, value = given
    major = generation(query.device.index)
    wanted = widths(major, query.shape[2], value.shape[2], len(query) != len(key))
    if wanted is None or {tensor.dtype for tensor in given} - {query.dtype} or query.dtype not in TYPES:
        found = f"{query.shape[2]} and {value.shape[2]} channels in {query.dtype}"
        raise ValueError(f"flash attention 4 takes no heads of {found} on compute capability {major}.x")
    sizes = (wanted[0], wanted[0], wanted[1])
    query, key, value = (wide(tensor.transpose(0, 1), size) for tensor, size in zip(given, sizes, strict=True))
    return QueryKeyValue(query, key, value)


def _options(asked: Scope) -> dict[str, Any]:
    """What forward and backward are asked alike. A window counts the tokens before a query's own."""
    most = max(int(asked.longest), _LEAST)
    return {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), asked.bounds),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), most), "softmax_scale": asked.scale, "causal": True,
        "window_size_left": asked.window - 1 if asked.window else None,
        "window_size_right": 0 if asked.window else None,
    }


flash_attention_4, _backward = attention_operation(
    "flash_attention_4", "Tensor bounds, Tensor longest, int window, float scale, float cap", _output, _gradients
)
