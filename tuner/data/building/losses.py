"""How much of the documents their length costs, and the row lengths that would keep them: for warnings and errors.

Nothing of it is kept in a prepared directory: the lengths are read off the documents' offsets when there is something
to say, so that what was prepared before is judged like what is prepared now, however many workers built it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.data.building.pack import TOO_LONG
from tuner.data.prepared import open_stream, view
from tuner.errors import DataError

if TYPE_CHECKING:
    from tuner.data.building.spec import PrepareSpec

MANY, MOST = 0.02, 0.5
"""Shares of a split's documents: a loss above the first is warned of; above the second it is an error by default."""
WHOLE = (0.95, 0.99)
"""Shares of the documents for which the row length that keeps them whole is named."""
_EXACT_BITS = 7
"""Lengths below 128 are counted one by one, longer ones in steps of at most 1/64 of them: memory stays bounded."""


class Loss(NamedTuple):
    """The documents of one split that are longer than a row."""

    split: str
    documents: int
    affected: int
    what: str
    """What happens to them."""

    @property
    def share(self) -> float:
        """Of the split's documents."""
        return self.affected / max(self.documents, 1)


def length_warnings(spec: "PrepareSpec", report: Mapping[str, Any], directory: Path) -> list[str]:
    """Warnings of the documents in a prepared directory that are dropped or cut because of their length.

    Raises DataError where that is more than half of a split and the recipe does not say `data.too_long` itself.
    """
    warnings = []
    for loss in _losses(report):
        if loss.share <= MANY:
            continue
        lengths = lengths_that_keep(directory / f"{loss.split}.documents.arrow", WHOLE, spec.examples.documents)
        of = f"{loss.affected:,} of {loss.documents:,} {spec.examples.unit}s ({loss.share:.0%})"
        text = f"data.{loss.split}: {of} are {loss.what}: longer than data.max_length ({spec.max_length:,})"
        if loss.share > MOST and spec.data.too_long == "auto":
            ways = "data.too_long: truncate (to cut them) or drop (to leave them out all the same)"
            ways = f"{raised(spec, lengths)}{ways}"
            raise DataError(f"{text}; {kept_by(lengths)}{_beyond(spec, lengths)}", hint=f"write {ways}")
        warnings.append(f"{text}; {kept_by(lengths)}{_beyond(spec, lengths)}")
    return warnings


def lengths_that_keep(documents: Path, shares: Sequence[float], each: int = 1) -> tuple[int, ...]:
    """The row length with which each of these shares of a file's documents stays whole, at most 1/64 too large.

    Where an example is `each` neighbours, of the examples, which need the sum of their lengths.
    """
    counts: dict[int, int] = {}
    longest = 0
    for lengths in (lengths.reshape(-1, each).sum(axis=1) for lengths in _lengths(documents)):
        values, often = np.unique(_rounded_up(lengths), return_counts=True)
        for value, count in zip(values.tolist(), often.tolist(), strict=True):
            counts[value] = counts.get(value, 0) + count
        longest = max(longest, int(lengths.max()))
    ordered = sorted(counts)
    reached = np.cumsum([counts[length] for length in ordered])
    at = [int(np.searchsorted(reached, np.ceil(share * reached[-1]))) for share in shares]
    return tuple(min(ordered[i], longest) for i in at)


def kept_by(lengths: Sequence[int]) -> str:
    """Which `data.max_length` keeps how many documents whole."""
    by_length = dict(zip(lengths, WHOLE, strict=True))  # of equal lengths the larger share
    first, *rest = by_length
    others = "".join(f", {length:,} keeps {by_length[length]:.0%}" for length in rest)
    return f"data.max_length: {first} keeps {by_length[first]:.0%} of them whole{others}"


def raised(spec: "PrepareSpec", lengths: Sequence[int]) -> str:
    """The line to write for longer rows, with the word that joins it to another way; empty where the model has none."""
    fitting = [length for length in lengths if spec.positions is None or length <= spec.positions]
    return f"data.max_length: {fitting[-1]}, or " if fitting else ""


def _beyond(spec: "PrepareSpec", lengths: Sequence[int]) -> str:
    if spec.positions is None or lengths[-1] <= spec.positions:
        return ""
    return f"; the model has {spec.positions:,} positions"


def _losses(report: Mapping[str, Any]) -> Iterator[Loss]:
    for split in ("train", "eval"):
        counts = report[split]
        if counts is None:
            continue
        dropped = int(counts["dropped_rows"].get(TOO_LONG, 0))
        yield Loss(
            split, int(counts["documents"]), dropped or int(counts["truncated"]), "dropped" if dropped else "cut"
        )


def _lengths(documents: Path) -> Iterator[npt.NDArray[np.int64]]:
    """int64[n]: the tokens of the documents of each record batch; only offsets are read, from the mapped file."""
    for chunk in open_stream(documents).column("input_ids").chunks:
        if len(chunk):
            yield np.diff(view(chunk.offsets)).astype(np.int64)


def _rounded_up(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    steps = np.maximum(np.frexp(lengths)[1] - _EXACT_BITS, 0)
    rounded: npt.NDArray[np.int64] = -(-lengths >> steps) << steps
    return rounded
