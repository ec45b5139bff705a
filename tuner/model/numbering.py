"""Numbers of tokens in models that count from their padding token on: RoBERTa and its kin."""

import torch


def from_padding(ids: torch.Tensor, position_ids: torch.Tensor, padding: int) -> torch.Tensor:
    """Numbers that fairseq gives to tokens: from ``padding`` + 1 on, and ``padding`` to padding tokens.

    Shapes: ids and position_ids int64 ``[T]``, the latter from 0 on in each document; result the same. A padding
    token inside a document is not counted.
    """
    is_padding = (ids == padding).long()
    before = is_padding.cumsum(0) - is_padding
    first = torch.arange(len(ids), device=ids.device) - position_ids
    # A document that continues one in a cache began before these tokens.
    skipped = torch.where(first < 0, 0, before - before[first.clamp_min(0)])
    return (position_ids + 1 - skipped) * (1 - is_padding) + padding
