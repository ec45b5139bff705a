"""Attention over packed rows: documents that lie in one row never see each other.

A microbatch is one flat sequence of T tokens made of whole documents. Where they lie travels as the keyword argument
``documents`` through the model's forward, made once for each microbatch, so no layer synchronises with the device.
Without the argument the function is plain causal attention (decoding with a cache).
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from tuner.model.blocked_attention import attend_in_blocks, band, plan_blocks
from tuner.model.documents import Documents, GrowingDocuments
from tuner.model.native.attention import document_bounds, native_attention
from tuner.model.native.library import TYPES
from tuner.model.transformers_private import attention_of, registered
from tuner.model.wrap import Wrapper, wrap
from tuner.runtime.device import target

PACKED = "tuner_packed"
NATIVE = "tuner_native"
"""The same with our compiled kernel where it serves: on the CPU, without a soft bound."""
# Keyword arguments of other attention functions that change the result. Ignoring one would be silently wrong.
_CHANGES_RESULT = {
    "cache": "cache",
    "indices": "keys that an indexer chooses",
    "block_indices": "blocks of keys that an indexer chooses",
}
_COUNTING = ("attention_chunk_size", "attn_temperature_tuning", "log_scaling_n_floor", "rel_extent")
"""Values of configs whose layers may count tokens."""


class Unsupported(ValueError):
    """A layer asks for attention that this module does not compute."""


class ByDistance(NamedTuple):
    """A bias of scores by how far a key lies from the query, spread over pairs of tokens for one document at a time."""

    numbers: torch.Tensor
    """``[batch, heads, T, extent]``: the bias of each query by the distance of the key; 0 from ``extent`` on."""

    def of_pairs(self, at: int, n_queries: int, n_keys: int) -> torch.Tensor:
        """The bias ``[batch, heads, n_queries, n_keys]`` of queries from ``at`` on, which are the last of the keys."""
        place = torch.arange(n_keys, device=self.numbers.device)
        distance, extent = place[n_keys - n_queries :, None] - place, self.numbers.shape[3]
        rows = self.numbers.narrow(2, at, n_queries)
        found = rows.gather(3, distance.clamp(0, extent - 1).expand(*rows.shape[:2], -1, -1))
        return found.masked_fill((distance < 0) | (distance >= extent), 0.0)


class Attended(NamedTuple):
    """What one layer attends with in a forward, as whoever observes it gets it."""

    query: torch.Tensor
    """``[heads, T, d]``"""
    key: torch.Tensor
    """``[kv_heads, T, d]``"""
    documents: Documents
    """Cut into chunks where the layer attends inside chunks alone."""
    window: int
    """Tokens seen, this one included; 0: all of the document."""
    scaling: float | None
    """Factor of the scores; None: by width."""


class _Asked(NamedTuple):
    """What a layer asks for: tokens seen, dropout, factor of scores (None: by width), their soft bound (0: none).

    And tokens of a chunk, beyond which none is seen (0: no chunks); a sink for each head, ``[1, heads, 1 or T, 1]``;
    a bias of the scores, ``[batch, heads, T, keys]`` or by distance.
    """

    window: int | None
    dropout: float
    scaling: float | None
    cap: float
    chunk: int
    sink: torch.Tensor | None
    bias: torch.Tensor | ByDistance | None

    @property
    def has_scores(self) -> bool:
        """Whether more is done to scores than torch's kernels do."""
        return bool(self.cap) or self.sink is not None or self.bias is not None


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | Documents | GrowingDocuments | None = None, *, native: bool = False, **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each document, with the signature of transformers' attention interface.

    Shapes: query ``[1, heads, T, d]``, key and value ``[1, kv_heads, T or longer with a cache, d]``; result
    ``[1, T, heads, d]``. Options used: ``scaling``, ``dropout``, ``sliding_window`` (tokens, this one included),
    ``softcap`` (a soft bound of the scores), ``s_aux`` (sinks ``[heads]``), ``sinks`` (``[1, heads, T, 1]``),
    ``position_bias`` (``[1, heads, T, keys]``, or by distance), ``documents``, and ``places`` (numbers of tokens there,
    ``[1, T]``) for a layer that counts; documents may stand in the mask's place, and a module may have the window
    that its class does not say (:func:`tell_attention`). Raises Unsupported for an option that this function does not
    compute.
    """
    if isinstance(attention_mask, (Documents, GrowingDocuments)):
        options["documents"], attention_mask = attention_mask, None
    _require_computed(module, attention_mask, options)
    documents: Documents | GrowingDocuments | None = options.get("documents")
    temperature = getattr(module, "tuner_temperature", None)
    if isinstance(documents, Documents) and documents.exchange is not None:
        # Rotated queries may be wider than they are attended with: no more is sent than that.
        if temperature is None:
            query, key, value = _as_computed(query, key, value)
        attention = partial(packed_attention, module, native=native)
        return documents.exchange.attend(attention, (query, key, value), options), None
    sink, bias = _sinks(options), options.get("position_bias")
    if temperature is not None:
        factor = temperature.of(_numbers(query, key, options)).unsqueeze(-1)
        query = (query * factor).to(query.dtype)
        bias = _scaled(bias, factor)
    asked = _Asked(
        options.get("sliding_window") or getattr(module, "tuner_window", None), options.get("dropout", 0.0),
        options.get("scaling"), options.get("softcap") or 0.0, getattr(module, "tuner_chunk", 0), sink, bias,
    )
    if (observer := getattr(module, "tuner_observer", None)) is not None and isinstance(documents, Documents):
        cut = documents if documents.chunks is None or not asked.chunk else documents.chunks
        queries, keys = _as_computed(query[0], key[0])
        observer(Attended(queries, keys, cut, asked.window or 0, asked.scaling))
    is_alone = asked.dropout > 0 or bias is not None or (sink is not None and sink.shape[2] > 1)
    if documents is None:
        output = _causal(query, key, value, asked).transpose(1, 2)
    elif isinstance(documents, GrowingDocuments) or is_alone:
        output = _one_by_one((query, key, value), documents, asked)
    else:
        if asked.chunk:
            assert documents.chunks is not None, "where layers have chunks, documents are cut into them"
            documents = documents.chunks
        output = _packed(_as_computed(query[0], key[0], value[0]), documents, asked, native)[None]
    return output.contiguous(), None


def compiled_attention(*given: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """:func:`packed_attention` by the kernel that is compiled for this processor, where that serves."""
    return packed_attention(*given, native=True, **options)


def _require_computed(module: torch.nn.Module, mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    unsupported = [what for name, what in _CHANGES_RESULT.items() if options.get(name) is not None]
    if mask is not None:
        unsupported.append("a mask or bias of the model's own (attention_mask)")
    if not (options.get("is_causal") or getattr(module, "is_causal", True)):
        unsupported.append("bidirectional attention")
    if unsupported:
        raise Unsupported(f"its attention has what packed attention does not compute: {', '.join(unsupported)}")


def _sinks(options: dict[str, Any]) -> torch.Tensor | None:
    """Sinks ``[1, heads, 1, 1]``, or ``[1, heads, T, 1]`` where each query has its own."""
    by_head: torch.Tensor | None = options.get("s_aux")
    by_query: torch.Tensor | None = options.get("sinks")
    return by_query if by_head is None else by_head.view(1, -1, 1, 1)


def _numbers(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Numbers ``[1, 1, T]`` of the queries in their documents; without any, the last ones of all keys."""
    places: torch.Tensor | None = options.get("places")
    if places is None:
        return torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)[None, None]
    return places[:, None]


def _scaled(bias: torch.Tensor | ByDistance | None, factor: torch.Tensor) -> torch.Tensor | ByDistance | None:
    if isinstance(bias, ByDistance):
        return ByDistance((bias.numbers.float() * factor).to(bias.numbers.dtype))
    return None if bias is None else (bias.float() * factor).to(bias.dtype)


def _packed(tensors: tuple[torch.Tensor, ...], documents: Documents, asked: _Asked, native: bool) -> torch.Tensor:
    """Query, key and value ``[heads, T, d]`` to ``[T, heads, d]``: by what the device has for it."""
    query, key, value = tensors
    scale = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    window, output = asked.window or 0, query
    sink = None if asked.sink is None else asked.sink.flatten().to(torch.promote_types(query.dtype, torch.float32))
    if target(query) == "cuda":
        from tuner.model import cuda_attention

        output = cuda_attention.attend(query, key, value, documents, window, scale, asked.cap, sink)
    elif native and not asked.cap and all(tensor.dtype in TYPES for tensor in tensors):
        output = native_attention(query, key, value, documents.host, window, scale, sink)[0]
    else:
        output = attend_in_blocks(query, key, value, documents, window, scale, asked.cap, sink)
    return output


def _as_computed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In autocast's type where autocast is on: rotated queries may be float32 while values are bf16."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _one_by_one(
    tensors: tuple[torch.Tensor, ...], documents: Documents | GrowingDocuments, asked: _Asked
) -> torch.Tensor:
    """Torch's own attention for each document. The compiler would make a program of each packing: where documents
    end are numbers here."""
    if isinstance(documents, GrowingDocuments):
        queries, keys = documents.new, documents.whole
    else:
        queries = keys = tuple(documents.host.diff().tolist())
    parts = zip(*(one.split(own, dim=2) for one, own in zip(tensors, (queries, keys, keys), strict=True)), strict=True)
    each = _by_document(asked, queries, keys)
    found = [_causal(q, k, v, own) for (q, k, v), own in zip(parts, each, strict=True)]
    return torch.cat(found, dim=2).transpose(1, 2)


def _by_document(asked: _Asked, queries: tuple[int, ...], keys: tuple[int, ...]) -> Iterator[_Asked]:
    """What is asked for in each document, of so many queries and keys: its part of sinks and bias."""
    at = first = 0
    for n_queries, n_keys in zip(queries, keys, strict=True):
        sink, bias = asked.sink, asked.bias
        if sink is not None and sink.shape[2] > 1:
            sink = sink.narrow(2, at, n_queries)
        if isinstance(bias, ByDistance):
            bias = bias.of_pairs(at, n_queries, n_keys)
        elif bias is not None:
            bias = bias.narrow(2, at, n_queries).narrow(3, first, n_keys)
        yield asked._replace(sink=sink, bias=bias)
        at, first = at + n_queries, first + n_keys


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Asked) -> torch.Tensor:
    """Attention of the last ``query.shape[2]`` positions of one document to its keys."""
    n_query, n_key, window, mask = query.shape[2], key.shape[2], asked.window or 0, None
    bias = asked.bias.of_pairs(0, n_query, n_key) if isinstance(asked.bias, ByDistance) else asked.bias
    bounded = (window and window < n_key) or (asked.chunk and asked.chunk < n_key)
    if n_query > 1 and (n_key != n_query or asked.has_scores or bounded):
        mask = band(n_query, n_key, window, query.device)
        if asked.chunk:
            chunk = torch.arange(n_key, device=query.device) // asked.chunk
            mask = mask & (chunk[n_key - n_query :, None] == chunk)
    elif n_query == 1 and bounded:
        seen = min(window or n_key, (n_key - 1) % asked.chunk + 1 if asked.chunk else n_key)
        key, value = key[:, :, -seen:], value[:, :, -seen:]
        bias = None if bias is None else bias[..., -seen:]
    if asked.has_scores:
        return _by_scores(query, key, value, asked, bias, mask)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=asked.dropout, is_causal=mask is None and n_query > 1,
        scale=asked.scaling, enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Asked, bias: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """The same with a soft bound, a bias or sinks, for which torch has no kernel: all scores at one time."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if asked.scaling is None else asked.scaling
    scores = query @ key.mT * scale
    if asked.cap:
        scores = torch.tanh(scores / asked.cap) * asked.cap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if asked.sink is not None:
        scores = torch.cat([scores, asked.sink.to(scores.dtype).expand(*scores.shape[:3], 1)], -1)
    share = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    share = share[..., : key.shape[2]].to(query.dtype)
    return drop(share, asked.dropout) @ value


def forget_documents() -> None:
    """Drop what is kept of the documents of earlier microbatches, which is made again where it is wanted."""
    plan_blocks.cache_clear()
    document_bounds.cache_clear()


def counts_tokens(config: PretrainedConfig) -> bool:
    """Whether layers of such a model may count tokens by themselves (:mod:`tuner.model.counted`)."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in _COUNTING)


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


# What decoder layers keep from their attention: where documents lie, and how far back a token sees.
#
# Classes tell both by a mask, which our attention goes without. Most hand on options too, and ours takes documents and
# windows from these. A layer that takes options and drops them (StableLM, Nemotron) gives its attention the documents
# in the mask's place; attention whose class knows its window from the mask alone (Qwen2-MoE, PhiMoE) keeps its length.
# Either way the proof at the start of a training holds the result to the class's own.

WINDOWS = ("sliding_window",)
"""Keys of configs that say how many tokens a layer sees, this one included."""
CHUNKS = ("attention_chunk_size",)
"""Those that say inside chunks of how many tokens it sees any."""
_OPTION, _SLIDING, _MASK = "sliding_window", "sliding_attention", "create_sliding_window_causal_mask"


def window_of(config: PretrainedConfig) -> int | None:
    """The sliding window of those of a model's layers that have one; None without any."""
    return next((value for key in WINDOWS if (value := getattr(config, key, None)) is not None), None)


def tell_attention(decoder: nn.Module, config: PretrainedConfig) -> None:
    """Have the attention of a decoder's layers know documents and windows, in place."""
    windows = _windows(decoder, config.get_text_config())
    module: Any
    for module in decoder.modules():
        own = type(module).forward
        if hasattr(module, "self_attn") and _drops_options(own):
            _give_documents(module)
        if windows and hasattr(module, "layer_idx") and "ALL_ATTENTION_FUNCTIONS" in _names(own):
            window = windows[module.layer_idx % len(windows)]
            if window is not None and _OPTION not in _names(own):
                module.tuner_window = window


def _windows(decoder: nn.Module, config: PretrainedConfig) -> list[int | None]:
    """Of each layer the tokens that it sees, this one included, as its decoder's masks have it; None: all before.

    Empty without windows.
    """
    window = window_of(config)
    if window is None or _MASK not in _names(type(decoder).forward):
        return []
    kinds = getattr(config, "layer_types", None)
    return [window] if kinds is None else [window if kind == _SLIDING else None for kind in kinds]


def _drops_options(forward: Callable[..., Any]) -> bool:
    """Whether a forward takes a mask and options by name, and reads none of the latter."""
    plain = inspect.unwrap(forward)
    options = inspect.getfullargspec(plain).varkw
    if options is None or "attention_mask" not in inspect.signature(plain).parameters:
        return False
    return all(step.argval != options for step in dis.get_instructions(plain.__code__))


def _give_documents(layer: nn.Module) -> None:
    own = layer.forward

    @wraps(own)
    def forward(*args: Any, documents: Any = None, **options: Any) -> Any:
        return own(*args, **(options if documents is None else {**options, "attention_mask": documents}))

    wrap(layer, Wrapper.DOCUMENTS, forward)


def _names(forward: Callable[..., Any]) -> set[object]:
    """What a forward reads, and the names of options that it gives."""
    if (code := getattr(inspect.unwrap(forward), "__code__", None)) is None:
        return set()
    given = [name for each in code.co_consts if isinstance(each, tuple) for name in each]
    return {*code.co_names, *given}
