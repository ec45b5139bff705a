"""Greedy decoding of several prompts at once, the same on every rank."""

import inspect
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from transformers import DynamicCache, DynamicLayer, PretrainedConfig

from tuner.model import transformers_private
from tuner.model.build import decoder_of
from tuner.model.documents import Carried, GrowingDocuments
from tuner.model.root import CausalLM


class SideBySide(DynamicCache):
    """Keys and values of several documents that grow at the same time, each at its own length.

    A layer gets the keys of all of them end to end; :class:`GrowingDocuments` says where each one's lie. A layer with a
    sliding window keeps all keys too: attention leaves out those that are too old.
    """

    def __init__(self, config: PretrainedConfig, count: int) -> None:
        super().__init__(config=config)
        self.documents = GrowingDocuments((), (0,) * count)
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def grow(self, new: Sequence[int]) -> None:
        """Before a forward: each document will get so many tokens."""
        whole = (past + more for past, more in zip(self.documents.whole, new, strict=True))
        self.documents = GrowingDocuments(tuple(new), tuple(whole))

    def keep(self, places: Sequence[int]) -> None:
        """Forget all documents but those at these places."""
        new, whole = self.documents.new, self.documents.whole
        self.documents = GrowingDocuments(tuple(new[i] for i in places), tuple(whole[i] for i in places))
        self._kept = {layer: [kept[i] for i in places] for layer, kept in self._kept.items()}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``[1, heads, new tokens of all, d]``; all of them so far, end to end."""
        added = list(zip(*(states.split(self.documents.new, 2) for states in (key_states, value_states)), strict=True))
        if (before := self._kept.get(layer_idx)) is not None:
            added = [
                (torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2))
                for (keys, values), (more_keys, more_values) in zip(before, added, strict=True)
            ]
        self._kept[layer_idx] = added
        return torch.cat([keys for keys, _ in added], 2), torch.cat([values for _, values in added], 2)

    def lengthen(self, whole: Sequence[int]) -> None:
        """Have each document at so many tokens, of whatever keys and values: for what is decoded without numbers."""
        for layer, kept in self._kept.items():
            self._kept[layer] = [
                (_of_length(keys, length), _of_length(values, length))
                for (keys, values), length in zip(kept, whole, strict=True)
            ]
        self.documents = GrowingDocuments(self.documents.new, tuple(whole))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest document before this forward."""
        past = (whole - new for new, whole in zip(self.documents.new, self.documents.whole, strict=True))
        return max(past, default=0)


@torch.no_grad()
def greedy(
    root: CausalLM, prompts: Sequence[Sequence[int]], eos_ids: Collection[int], limits: Sequence[int],
    device: torch.device, between: Callable[[], None] = lambda: None,
    ends: Callable[[int, Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """The most likely continuation of each prompt, up to an end token (left out) or as many tokens as its limit.

    All prompts take each step together where the model keeps plain keys and values and has our attention: reading the
    weights, and gathering them under FSDP2, costs as much for one as for several. Other models take them one by one,
    each with the cache that `generate` of transformers gives it.
    Under FSDP2 every rank must call it with the same prompts: the ranks then take the same number of forwards.
    ``between`` is called before each; what it raises ends the decoding. ``ends`` says of the prompt at a place whether
    its answer so far is all of it.
    """
    config = root.model.config
    wanted = [i for i, limit in enumerate(limits) if limit > 0]
    answers: list[list[int]] = [[] for _ in prompts]
    together = _takes_several(root)
    for group in [wanted] if together else [[i] for i in wanted]:
        cache = SideBySide(config, len(group)) if together else _own_cache(root)
        live, given = group, [list(prompts[i]) for i in group]
        while live:
            between()
            tokens = _next_tokens(root, given, cache, device).tolist()
            going = []
            for place, (i, token) in enumerate(zip(live, tokens, strict=True)):
                if token not in eos_ids:
                    answers[i].append(token)
                    if len(answers[i]) < limits[i] and not (ends is not None and ends(i, answers[i])):
                        going.append(place)
            if isinstance(cache, SideBySide) and len(going) < len(live):
                cache.keep(going)
            live, given = [live[place] for place in going], [[tokens[place]] for place in going]
            if isinstance(cache, Carried) and not cache.arguments:  # the model keeps nothing: all its tokens again
                cache, given = _own_cache(root), [[*prompts[i], *answers[i]] for i in live]
    return answers


def _own_cache(root: CausalLM) -> Carried:
    """What carries one document from forward to forward: empty where the model makes its own in the first."""
    taken = inspect.signature(decoder_of(root.model).forward).parameters
    name = next((name for name in ("past_key_values", "cache_params") if name in taken), None)
    if name is None or not transformers_private.takes_dynamic_cache(root.model):
        return Carried({})
    return Carried({name: DynamicCache(config=root.model.config)})


def _next_tokens(
    root: CausalLM, given: list[list[int]], cache: SideBySide | Carried, device: torch.device
) -> torch.Tensor:
    """The likeliest tokens int64 ``[documents]`` after those that each document is given now."""
    lengths = [len(ids) for ids in given]
    if isinstance(cache, SideBySide):
        cache.grow(lengths)
        starts = [whole - new for whole, new in zip(cache.documents.whole, lengths, strict=True)]
    else:
        starts = [cache.tokens]
    places = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    lasts = [end - 1 for end in accumulate(lengths)]
    ids, positions, at = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (list(chain(*given)), places, lasts)
    )
    if isinstance(cache, SideBySide):
        return root.next_tokens(ids, positions, at, Carried({"past_key_values": cache}), cache.documents)
    return root.next_tokens(ids, positions, at, cache, None)


def fullest_forwards(
    root: CausalLM, prompts: Sequence[Sequence[int]], limits: Sequence[int], device: torch.device
) -> None:
    """The forwards of :func:`greedy` in which memory is fullest, without those between them; for fake tensors.

    They are the first one, and that after which most keys and values are there, if every answer reaches its limit.
    """
    config = root.model.config
    asked = [(list(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True) if limit > 0]
    if not asked:
        return
    if not _takes_several(root):  # a state whose size is its own matter: all tokens of the longest one at once
        longest = max(len(prompt) + limit - 1 for prompt, limit in asked)
        _next_tokens(root, [[0] * longest], _own_cache(root), device)
        return
    cache = SideBySide(config, len(asked))
    _next_tokens(root, [prompt for prompt, _ in asked], cache, device)

    def living(more: int) -> list[int]:
        return [place for place, (_, limit) in enumerate(asked) if limit > more]

    def tokens(more: int) -> int:
        return sum(len(asked[place][0]) + more for place in living(more))

    more = max({limit - 1 for _, limit in asked}, key=tokens)
    if more > 0:
        cache.keep(living(more))
        cache.lengthen([len(asked[place][0]) + more - 1 for place in living(more)])
        _next_tokens(root, [[0]] * len(living(more)), cache, device)


def _of_length(states: torch.Tensor, length: int) -> torch.Tensor:
    return states.new_empty((*states.shape[:2], length, states.shape[3]))


def _takes_several(root: CausalLM) -> bool:
    """Whether layers keep keys and values of each token and nothing else, and our attention keeps documents apart."""
    layers = DynamicCache(config=root.model.config).layers
    known = (DynamicLayer, transformers_private.DynamicSlidingWindowLayer)
    plain = bool(layers) and all(type(layer) in known for layer in layers)
    return root.layout.takes_documents and plain and root.layout.mixers is None
