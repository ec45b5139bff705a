"""Attention over packed rows: documents that lie in one row never see each other.

A microbatch is one flat sequence of T tokens made of whole documents. Where they lie travels as the keyword argument
``documents`` through the model's forward, made once for each microbatch, so no layer synchronises with the device.
Without the argument the function is plain causal attention (decoding with a cache).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from tuner.model.blocked_attention import attend_documents, band, plan_blocks
from tuner.model.documents import Documents, GrowingDocuments
from tuner.model.native.attention import document_bounds, native_attention
from tuner.model.native.library import TYPES
from tuner.model.transformers_private import attention_of, registered
from tuner.runtime.device import target

PACKED = "tuner_packed"
NATIVE = "tuner_native"
"""The same with our compiled kernel where it serves: on the CPU, without a soft bound."""
# Keyword arguments of other attention functions that change the result. Ignoring one would be silently wrong.
_CHANGES_RESULT = {"s_aux": "attention sinks (s_aux)", "position_bias": "a position bias", "cache": "cache"}


class Unsupported(ValueError):
    """A layer asks for attention that this module does not compute."""


class _Asked(NamedTuple):
    """What a layer asks for: tokens seen, dropout, factor of scores (None: by width), their soft bound (0: none)."""

    window: int | None
    dropout: float
    scaling: float | None
    cap: float


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    native: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document, with the signature of transformers' attention interface.

    Shapes: query ``[1, heads, T, d]``, key and value ``[1, kv_heads, T or longer with a cache, d]``; result
    ``[1, T, heads, d]``. Options used: ``scaling``, ``dropout``, ``sliding_window`` (tokens, this one included),
    ``softcap`` (a soft bound of the scores) and ``documents``. Raises Unsupported for an option that this function does
    not compute.
    """
    unsupported = [what for name, what in _CHANGES_RESULT.items() if options.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("a mask or bias of the model's own (attention_mask)")
    if not (options.get("is_causal") or getattr(module, "is_causal", True)):
        unsupported.append("bidirectional attention")
    if unsupported:
        raise Unsupported(f"its attention has what packed attention does not compute: {', '.join(unsupported)}")
    documents: Documents | GrowingDocuments | None = options.get("documents")
    asked = _Asked(
        options.get("sliding_window"),
        options.get("dropout", 0.0),
        options.get("scaling"),
        options.get("softcap") or 0.0,
    )
    if documents is None:
        output = _causal(query, key, value, asked).transpose(1, 2)
    elif isinstance(documents, GrowingDocuments):
        sizes = (documents.new, documents.whole, documents.whole)
        output = _one_by_one((query, key, value), sizes, asked)
    elif asked.dropout > 0:
        lengths = tuple(documents.host.diff().tolist())
        output = _one_by_one((query, key, value), (lengths,) * 3, asked)
    else:
        output = _packed(_as_computed(query[0], key[0], value[0]), documents, asked, native)[None]
    return output.contiguous(), None


def compiled_attention(*given: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """:func:`packed_attention` by the kernel that is compiled for this processor, where that serves."""
    return packed_attention(*given, native=True, **options)


def _packed(tensors: tuple[torch.Tensor, ...], documents: Documents, asked: _Asked, native: bool) -> torch.Tensor:
    """Query, key and value ``[heads, T, d]`` to ``[T, heads, d]``: by what the device has for it."""
    query, key, value = tensors
    scale = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    window, output = asked.window or 0, query
    if target(query) == "cuda":
        from tuner.model import cuda_attention

        output = cuda_attention.attend(query, key, value, documents, window, scale, asked.cap)
    elif native and not asked.cap and all(tensor.dtype in TYPES for tensor in tensors):
        output = native_attention(query, key, value, documents.host, window, scale)[0]
    else:
        output = attend_documents(query, key, value, documents.host, window, scale, asked.cap)
    return output


def _as_computed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In autocast's type where autocast is on: rotated queries may be float32 while values are bf16."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    tensors: tuple[torch.Tensor, ...],
    sizes: tuple[tuple[int, ...], ...],
    asked: _Asked,
) -> torch.Tensor:
    """Torch's own attention for each document; of query, key and value so many positions each are its own."""
    parts = zip(*(tensor.split(own, dim=2) for tensor, own in zip(tensors, sizes, strict=True)), strict=True)
    return torch.cat([_causal(q, k, v, asked) for q, k, v in parts], dim=2).transpose(1, 2)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Asked) -> torch.Tensor:
    """Attention of the last ``query.shape[2]`` positions of one document to its keys."""
    n_query, n_key, window = query.shape[2], key.shape[2], asked.window
    mask = None
    if n_query > 1 and (n_key != n_query or asked.cap or (window is not None and window < n_key)):
        mask = band(n_query, n_key, window or 0, query.device)
    elif n_query == 1 and window is not None and window < n_key:
        key, value = key[:, :, -window:], value[:, :, -window:]
    if asked.cap:
        return _capped(query, key, value, asked, mask)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=asked.dropout,
        is_causal=mask is None and n_query > 1,
        scale=asked.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Asked, mask: torch.Tensor | None
) -> torch.Tensor:
    """The same with a soft bound of the scores, for which torch has no kernel: all scores at one time."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    scores = torch.tanh(query @ key.mT * scale / asked.cap) * asked.cap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    share = drop(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), asked.dropout)
    return share @ value


def forget_documents() -> None:
    """Drop what is kept of the documents of earlier microbatches, which is made again where it is wanted."""
    plan_blocks.cache_clear()
    document_bounds.cache_clear()


def is_ours(config: PretrainedConfig) -> bool:
    """Whether a model of this config attends by the functions of this module."""
    return attention_of(config) in (PACKED, NATIVE)


@contextmanager
def withdrawn() -> Iterator[None]:
    """Within, transformers does not know the functions: a model that would use them cannot run."""
    known = registered(AttentionInterface)
    ours = {name: known.pop(name) for name in (PACKED, NATIVE) if name in known}
    try:
        yield
    finally:
        known.update(ours)


def register() -> None:
    """Make the functions known to transformers under the names :data:`PACKED` and :data:`NATIVE`."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(NATIVE, compiled_attention)
