"""How many tokens back each layer looks: by the masks that transformers makes, and as our attention is told.

A model may say a sliding window, or chunks, in its masks alone. Our attention never sees those, and short documents do
not show it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError
from tuner.model import transformers_private
from tuner.model.attention import packed_attention
from tuner.model.root import CausalLM
from tuner.model.transformers_private import attention_of, registered

_NOTING = "tuner_noting"


@torch.no_grad()
def require_same_reach(root: CausalLM, plain: PreTrainedModel, longest: int) -> None:
    """Let one token through both and compare what the last token of ``longest`` would see in each layer.

    Does nothing where no window or chunk of the config is shorter. Raises RecipeError naming both numbers.
    """
    if not root.takes_documents or not _has_bounds(root.model.config, longest):
        return
    ids = torch.zeros(1, dtype=torch.int64)
    with _noting(plain) as wanted:
        masks = _Masks(longest, wanted)
        AttentionMaskInterface.register(_NOTING, masks.make)
        AttentionInterface.register(_NOTING, masks.attend)
        plain(input_ids=ids[None], use_cache=False)
    with _noting(root.model) as told:
        AttentionInterface.register(_NOTING, _Windows(longest, told).attend)
        root.logits(ids, ids, (1,), ids)
    for layer, (seen, ours) in enumerate(zip(wanted, told, strict=False)):
        if seen is not None and seen != ours:
            raise RecipeError(
                f"{type(root.model).__name__} cannot be trained on documents of {longest:,} tokens: its layer {layer} "
                f"sees {seen:,} of them by a mask of its own, and all {ours:,} in packed attention",
                hint=f"set data.max_length to at most {_shortest(root.model.config):,}, or choose another model",
            )


def require_numbered_by_document(root: CausalLM, row: int) -> None:
    """Raise RecipeError where attention depends on a token's number in the row, and rows of ``row`` tokens show it.

    Llama 4 raises the temperature of layers without rotation every so many tokens, and counts them itself.
    """
    text = root.model.config.get_text_config()
    step = getattr(text, "floor_scale", None)
    if step and getattr(text, "attn_temperature_tuning", False) and row >= step:
        raise RecipeError(
            f"{type(root.model).__name__} cannot be trained on rows of {row:,} tokens with several documents: it "
            f"counts tokens from the start of the row, which changes its attention from token {step:,} on",
            hint="set data.packing: false and train.micro_batch_size: 1",
        )


class _Masks:
    """transformers' masks and attention under another name: notes how far back the mask of each layer reaches."""

    def __init__(self, longest: int, noted: list[int | None]) -> None:
        self._longest, self._noted = longest, noted
        self._made: list[tuple[torch.Tensor, int | None]] = []

    def make(self, **options: Any) -> torch.Tensor:
        """A mask, and what its function says of the last token of the longest document."""
        mask: torch.Tensor | None = transformers_private.sdpa_mask(**{**options, "allow_is_causal_skip": False})
        assert mask is not None  # what it may be where it may be skipped
        try:
            last, keys = torch.tensor(self._longest - 1), torch.arange(self._longest)
            seen = torch.as_tensor(options["mask_function"](0, 0, last, keys))
            self._made.append((mask, int(seen.expand(self._longest).sum())))
        except (IndexError, RuntimeError, TypeError):  # of a kind that knows this row alone
            self._made.append((mask, None))
        return mask

    def attend(
        self, module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of one token, with a mask that is known or not."""
        self._noted.append(next((seen for mask, seen in self._made if mask is attention_mask), None))
        return _itself(query, value)


class _Windows:
    """Our attention under another name: notes the window that each layer asks for."""

    def __init__(self, longest: int, noted: list[int | None]) -> None:
        self._longest, self._noted = longest, noted

    def attend(
        self, module: torch.nn.Module, query: Any, key: Any, value: Any, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of one token."""
        self._noted.append(min(self._longest, options.get("sliding_window") or self._longest))
        return _itself(query, value)


def _itself(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
    """What a token gets that sees itself alone: its own value ``[1, heads, 1, d]``, by transformers' interface."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


@contextmanager
def _noting(model: PreTrainedModel) -> Iterator[list[int | None]]:
    """Within, the model attends by what is registered under the noting name; a list for what that notes."""
    chosen = attention_of(model.config)
    AttentionInterface.register(_NOTING, packed_attention)
    model.set_attn_implementation(_NOTING)
    try:
        yield []
    finally:
        model.set_attn_implementation(chosen)
        for interface in (AttentionInterface, AttentionMaskInterface):
            registered(interface).pop(_NOTING, None)


def _bounds(config: PretrainedConfig) -> list[int]:
    """What may be the length of a window or a chunk in a config."""
    values = config.get_text_config().to_dict().items()
    return [value for key, value in values if type(value) is int and value > 1 and ("window" in key or "chunk" in key)]


def _has_bounds(config: PretrainedConfig, longest: int) -> bool:
    return any(bound < longest for bound in _bounds(config))


def _shortest(config: PretrainedConfig) -> int:
    return min(_bounds(config))
