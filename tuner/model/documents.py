"""Where the documents of a packed microbatch lie: made once on the CPU, read by every layer without a wait; padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tuner.runtime.device import to_device
from tuner.runtime.torch_private import mark_dynamic

_CARRIED = ("past_key_values", "cache_params", "state", "past_buckets_states")
"""How outputs of transformers name what the next call takes; the last is Reformer's."""


@dataclass(frozen=True)
class GrowingDocuments:
    """Documents that are decoded side by side: of each, the tokens of this forward, and all tokens so far with them.

    Keys and values of each document's tokens so far lie end to end.
    """

    new: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(eq=False)
class Carried:
    """What the tokens of documents that are decoded leave for the next ones: a cache, or states of another kind.

    An own type, not a dict: what wraps a module copies those, and what a forward notes would be lost.
    """

    arguments: dict[str, Any]
    """By the name of the argument in which the decoder takes it."""
    tokens: int = 0
    """That were decoded so far."""

    def note(self, output: Any, n_tokens: int) -> None:
        """Take what the decoder gave back of it after ``n_tokens`` more."""
        given_back = {name: getattr(output, name, None) for name in _CARRIED}
        self.arguments |= {name: value for name, value in given_back.items() if value is not None}
        self.tokens += n_tokens


class HeadExchange(Protocol):
    """Attention where each process has a share of the positions, for all heads."""

    def attend(
        self, attention: Callable[..., tuple[torch.Tensor, None]], tensors: tuple[torch.Tensor, ...],
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """What an attention function gives for query, key and value ``[1, heads, t, d]`` of the positions that are
        here: ``[1, t, heads, d]``."""


@dataclass(frozen=True, eq=False)
class Documents:
    """The bounds of the documents that lie end to end in T tokens. No layer asks the device for them.

    An own type, not a tuple: what wraps a module moves the tensors of a tuple to the device, and `host` stays here.
    """

    host: torch.Tensor
    """int32 [documents + 1] on the CPU: 0, the end of each document, the last of them T."""
    device: torch.Tensor
    """The same on the device of the tokens, for kernels that take it (`cu_seqlens`)."""
    longest: torch.Tensor
    """int32 [1] on the CPU: the tokens of the longest. A tensor, for compiled layers would be made for a number."""
    bound: int
    """No document of any microbatch has more tokens: what compiled layers may take for a constant."""
    chunks: "Documents | None" = None
    """The same tokens, each document cut into chunks from its start, for layers that attend inside chunks alone."""
    exchange: HeadExchange | None = None
    """What brings the positions together around attention, where each process computes a share of them."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, bound: int | None = None, chunk: int = 0) -> "Documents":
        """The documents of these lengths, in order; one copy to the device that nothing waits for.

        Without a ``bound`` there is that of these documents alone. With ``chunk`` tokens in one there are chunks too.
        """
        host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        on_device = to_device(host, device)
        for bounds in (host, on_device):  # a compiled block is the same one for any number of documents
            mark_dynamic(bounds, 0)
        longest = max(lengths)
        chunks = None
        if chunk:
            cut = [min(chunk, length - at) for length in lengths for at in range(0, length, chunk)]
            chunks = Documents.of(cut, device, min(bound or longest, chunk))
        return Documents(host, on_device, torch.tensor([longest], dtype=torch.int32), bound or longest, chunks)


def side_by_side(
    starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The position in the row of each token ``[documents, longest]`` of some of its documents, for a padded batch.

    And whether it is the document's: what fills a document up is its last token again.
    """
    steps = np.arange(sizes.max())
    return starts[:, None] + np.minimum(steps, sizes[:, None] - 1), steps < sizes[:, None]


@dataclass(frozen=True)
class Padding:
    """Fills microbatches up to ``tokens`` with documents of at most ``longest``, from which nothing is learned.

    So compiled layers see rows of one size alone; longer ones, of which only mismatched answers make some, are filled
    up to a multiple of it.
    """

    tokens: int
    longest: int

    def fill(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Ids and positions ``[tokens]`` and the lengths of all documents; a full microbatch comes back as is."""
        missing = -input_ids.shape[0] % self.tokens
        if missing == 0:
            return input_ids, position_ids, lengths
        whole, rest = divmod(missing, self.longest)
        added = torch.arange(missing, device=position_ids.device) % self.longest
        filled = functional.pad(input_ids, (0, missing)), torch.cat((position_ids, added))
        return *filled, (*lengths, *[self.longest] * whole, *[rest][: rest > 0])
