"""Attention over packed rows: documents that lie in one row never see each other.

A microbatch is one flat sequence of T tokens made of whole documents. Their lengths travel as the keyword argument
``document_lengths`` through the model's forward; they are Python integers made once on the CPU, so no layer
synchronises with the device. Without the argument the function is plain causal attention (decoding with a cache).
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "tuner_packed"
# Keyword arguments of other attention functions that change the result. Ignoring one would be silently wrong.
_CHANGES_RESULT = ("softcap", "s_aux", "position_bias", "cache")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document, with the signature of transformers' attention interface.

    Shapes: query ``[1, heads, T, d]``, key and value ``[1, kv_heads, T or longer with a cache, d]``; result
    ``[1, T, heads, d]``. Options used: ``scaling``, ``dropout``, ``sliding_window`` (tokens, this one included) and
    ``document_lengths`` (sum T). Raises ValueError for an option that this function does not compute.
    """
    unsupported = [name for name in _CHANGES_RESULT if options.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if not (options.get("is_causal") or getattr(module, "is_causal", True)):
        unsupported.append("bidirectional attention")
    if unsupported:
        raise ValueError(f"packed attention does not compute {', '.join(unsupported)}")
    lengths = options.get("document_lengths") or (query.shape[2],)
    causal = [
        _causal(q, k, v, options.get("sliding_window"), options.get("dropout", 0.0), options.get("scaling"))
        for q, k, v in _documents(query, key, value, lengths)
    ]
    output = causal[0] if len(causal) == 1 else torch.cat(causal, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if len(lengths) == 1:
        return [(query, key, value)]
    sizes = list(lengths)
    parts = zip(query.split(sizes, dim=2), key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True)
    return list(parts)


def _causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the last ``query.shape[2]`` positions of one document to its keys."""
    n_query, n_key = query.shape[2], key.shape[2]
    mask = None
    if n_query > 1 and (n_key != n_query or (window is not None and window < n_key)):
        mask = _band(n_query, n_key, window, query.device)
    elif n_query == 1 and window is not None and window < n_key:
        key, value = key[:, :, -window:], value[:, :, -window:]
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None and n_query > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _band(n_query: int, n_key: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean mask ``[n_query, n_key]``, true where a query may look: backwards, and fewer than ``window`` tokens."""
    distance = torch.arange(n_key - n_query, n_key, device=device)[:, None] - torch.arange(n_key, device=device)
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def register() -> None:
    """Make the function known to transformers under the name :data:`PACKED`."""
    AttentionInterface.register(PACKED, packed_attention)
