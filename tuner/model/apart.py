"""Documents that cannot lie end to end in a row: each starts at the first place of a sequence, as when it is alone.

A causal model does not see what comes after a token, so documents of a batch are filled up on the right and need no
mask; with the same ids again, which a class that makes masks or numbers of ids takes for what they are. How much may be
filled is bounded: where documents differ too much in length, one microbatch takes several forwards, of which each holds
those of about one length.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from tuner.model.documents import side_by_side
from tuner.runtime.device import to_device

COMPUTED_AT_MOST = 1.5
"""Tokens that a microbatch computes, over those that it has."""
Decode = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From ids int64 ``[documents, longest]`` and which of them count, bool ``[documents * longest]`` or None for all, to
hidden states ``[documents, longest, D]``."""


def forwards_of(lengths: Sequence[int], route: str, bounds: Sequence[int] = ()) -> list[list[int]]:
    """The documents of each forward, by their places in ``lengths``: the longest first, and in each forward too.

    On the route ``calls`` there is one in each. Else a forward takes the next longest as long as all that is computed
    so far is at most :data:`COMPUTED_AT_MOST` of the tokens. Documents on both sides of one of the ``bounds``, lengths
    above which a model computes otherwise, never share a forward.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    if route == "calls":
        return [[place] for place in order]
    forwards: list[list[int]] = []
    tokens = computed = 0
    for place in order:
        tokens += lengths[place]
        longest = lengths[forwards[-1][0]] if forwards else 0
        fits = bool(forwards) and computed + longest <= COMPUTED_AT_MOST * tokens
        if fits and not any(lengths[place] <= bound < longest for bound in bounds):
            forwards[-1].append(place)
            computed += longest
        else:
            forwards.append([place])
            computed += lengths[place]
    return forwards


def computed_tokens(lengths: Sequence[int], forwards: Sequence[Sequence[int]]) -> int:
    """Tokens that these forwards compute, what is filled up included."""
    return sum(len(forward) * lengths[forward[0]] for forward in forwards)


def hidden_states(
    decode: Decode, ids: torch.Tensor, lengths: Sequence[int], forwards: Sequence[Sequence[int]], count: int
) -> torch.Tensor:
    """Hidden states ``[T, D]`` of documents that lie end to end in ``ids`` ``[T]``, computed apart.

    There are ``count`` forwards, which another process may need: those after the given ones compute the shortest
    document again, and nothing is learned from them but that its gradient is zero.
    """
    if count == 1 and len(lengths) == 1:
        return decode(ids[None], None)[0]
    starts = np.array([0, *accumulate(lengths)], dtype=np.int64)
    sizes = np.array(lengths, dtype=np.int64)
    back = np.empty(int(starts[-1]), dtype=np.int64)
    parts: list[torch.Tensor] = []
    at = 0
    for number in range(count):
        chosen = np.array(forwards[number] if number < len(forwards) else forwards[-1][-1:])
        places, real = side_by_side(starts[chosen], sizes[chosen])
        if number < len(forwards):
            back[places[real]] = at + np.flatnonzero(real)
        else:
            real[:] = False
        counted = None if real.all() else to_device(real.ravel(), ids.device)
        hidden = decode(ids[to_device(places, ids.device)], counted)
        parts.append(hidden.flatten(0, 1))
        at += places.size
    return torch.cat(parts).index_select(0, to_device(back, ids.device))
