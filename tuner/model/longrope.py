"""LongRoPE in packed rows: each document is rotated by the factors of its own length.

Such a model (https://arxiv.org/abs/2402.13753) has two sets of factors, for documents up to the length of its first
training and for longer ones. transformers takes one of them for the whole row, by the highest position in it. Here the
short documents of a row and the long ones are given to it one after the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tuner.model.wrap import Wrapper, wrap
from tuner.runtime.device import to_device

_KIND = "longrope"


class RotationByDocument:
    """What makes the cosines and sines of a model with two sets of factors; nothing in any other model.

    It is given the lengths of the documents before a forward, on the host; no layer asks the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._new: tuple[int, ...] = ()
        self._whole: tuple[int, ...] = ()
        self.bounds: tuple[int, ...] = ()
        """Lengths above which documents are rotated by other factors."""
        for module in model.modules():
            if _KIND in _kinds(module):
                self._wrap(module)

    def expect(self, new: Sequence[int], whole: Sequence[int]) -> None:
        """The next forward has ``new`` tokens of each document, which with those before has ``whole`` tokens."""
        self._new, self._whole = tuple(new), tuple(whole)

    def _wrap(self, module: Any) -> None:
        own, kinds = module.forward, module.rope_type
        found = {_bound(module, kind) for kind in (kinds if isinstance(kinds, dict) else (None,))}
        self.bounds = tuple(sorted({*self.bounds, *(bound for bound in found if bound is not None)}))

        def forward(x: torch.Tensor, position_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
            places = self._places(_bound(module, *rest, **options), position_ids.shape[-1])
            if len(places) == 1:
                return own(x, position_ids, *rest, **options)
            back = np.argsort(np.concatenate(places))
            *chosen, order = (to_device(place, x.device) for place in (*places, back))
            made = [own(x, position_ids.index_select(-1, place), *rest, **options) for place in chosen]
            return tuple(torch.cat(parts, -2).index_select(-2, order) for parts in zip(*made, strict=True))

        wrap(module, Wrapper.DOCUMENTS, forward)

    def _places(self, bound: int | None, n_tokens: int) -> list[npt.NDArray[np.int64]]:
        """The tokens of short documents and those of long ones; one array where all take the same factors."""
        whole = np.arange(n_tokens, dtype=np.int64)
        if bound is None or sum(self._new) != n_tokens:
            return [whole]
        is_long = np.repeat(np.array(self._whole) > bound, self._new)
        return [whole[kind] for kind in (~is_long, is_long) if kind.any()]


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """The kinds of rotation that a module makes, where it makes any."""
    kind = getattr(module, "rope_type", None)
    return tuple(map(str, kind.values())) if isinstance(kind, dict) else (str(kind),)


def _bound(module: Any, layer_type: str | None = None) -> int | None:
    """The longest document that takes the short factors; None where this kind of layer has one set."""
    kind, parameters = module.rope_type, module.config.rope_parameters
    if layer_type is not None:
        kind, parameters = kind[layer_type], parameters[layer_type]
    return int(parameters["original_max_position_embeddings"]) if kind == _KIND else None
