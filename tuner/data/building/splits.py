"""The splits of prepared data, `data.train` and `data.eval`, as they are read: counts of sources, tables of documents.

What is kept of a document are 25 bytes: its digest, length and targets, and whether its record is that of the last one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.duration import Duration
from tuner.data.building.counts import ByAnswer, Counts
from tuner.data.building.encoded import EncodedBundle
from tuner.data.building.sampling import Digests, copies, distinct, hold_out
from tuner.data.building.spec import Source

_CHUNK = 1 << 16
_EVAL_SOURCES = 1 << 32
"""Held-out sources draw from other random words than training sources."""


@dataclass
class Split:
    """The documents of `data.train` or `data.eval` as they are read: counts of sources, tables of bundles."""

    name: str
    sources: Sequence[Source]
    holds_out: bool = False
    """Whether documents are held out of it."""
    counts: list[Counts] = field(default_factory=list)
    digests: bytearray = field(default_factory=bytearray)
    lengths: bytearray = field(default_factory=bytearray)
    targets: bytearray = field(default_factory=bytearray)
    follows: bytearray = field(default_factory=bytearray)
    """Tables of all bundles so far, as bytes: they grow in place."""
    fast: int = 0
    escaped: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    by_answer: ByAnswer = field(default_factory=ByAnswer)
    size: int = 0

    def __post_init__(self) -> None:
        self.counts = [Counts() for _ in self.sources]

    @property
    def by_source(self) -> bool:
        """Whether each source goes to a file of its own, of which its share is then taken."""
        return not all(source.share.is_whole for source in self.sources)

    @property
    def is_chosen_from(self) -> bool:
        """Whether not every document ends up in the one file of the split, once."""
        return self.holds_out or self.by_source

    def path(self, directory: Path, source: int) -> Path:
        """The file that a source's documents are first written to."""
        part = f".{source if self.by_source else 'all'}" if self.is_chosen_from else ""
        return directory / f"{self.name}{part}.arrow"

    def parts(self, directory: Path) -> list[tuple[Path, int]]:
        """Each such file, and how many documents it holds."""
        found: dict[Path, int] = {}
        for source, counts in enumerate(self.counts):
            path = self.path(directory, source)
            found[path] = found.get(path, 0) + counts.documents
        return list(found.items())

    def add(self, bundle: EncodedBundle) -> None:
        """Keep what is needed of a bundle."""
        self.digests += bundle.digests.tobytes()
        self.lengths += bundle.lengths.tobytes()
        self.targets += bundle.targets.tobytes()
        self.follows += bundle.follows.tobytes()
        self.fast += bundle.fast
        self.escaped += bundle.escaped
        self.notes.update(bundle.notes)
        self.by_answer.add(bundle.by_answer)

    def taken(self, seed: int) -> "SplitSelection":
        """The documents as the shares of its sources say."""
        base = _EVAL_SOURCES if self.name == "eval" else 0
        often = [
            copies(source.share, counts.documents, seed, base + number)
            for number, (source, counts) in enumerate(zip(self.sources, self.counts, strict=True))
        ]
        return SplitSelection(
            np.frombuffer(self.digests, dtype=np.uint64).reshape(-1, 2),
            np.frombuffer(self.lengths, dtype=np.uint32),
            np.frombuffer(self.targets, dtype=np.uint32),
            np.concatenate(often),
            _records(np.frombuffer(self.follows, dtype=np.bool_)),
        )


@dataclass(frozen=True)
class SplitSelection:
    """Documents of one split: their tables, and how often each is there."""

    digests: Digests
    lengths: npt.NDArray[np.uint32]
    targets: npt.NDArray[np.uint32]
    copies: npt.NDArray[np.int32]
    records: npt.NDArray[np.int64] | None = None
    """int64[documents]: the number of each document's record; None where each record is one document."""

    @property
    def present(self) -> Digests:
        """The digests of the documents that are there."""
        return self.digests if self.copies.all() else self.digests[self.copies > 0]

    def held_out(self, amount: Duration, seed: int) -> "list[SplitSelection]":
        """Hold documents out of those that are taken; what is held out is there once and not trained on."""
        held = np.zeros(len(self.copies), dtype=np.bool_)
        there = self.copies > 0
        held[there] = hold_out(self.present, amount, seed, None if self.records is None else self.records[there])
        parts = (np.where(held, 0, self.copies), held.astype(np.int32))
        return [replace(self, copies=often.astype(np.int32)) for often in parts]

    def records_there(self) -> int:
        """Records of which a document is there, each as often as its documents are, where it is one document."""
        if self.records is None:
            return int(self.copies.sum())
        return len(np.unique(self.records[self.copies > 0]))

    def report(self, counts: Counts) -> dict[str, Any]:
        """The split's counts as JSON values; documents and tokens as often as they are trained on."""
        there = self.copies > 0
        return {
            "rows": counts.records,
            "documents": int(self.copies.sum()),
            "tokens": self._total(self.lengths),
            "trained": self._total(self.targets),
            "longest": int(self.lengths.max(initial=0, where=there)),
            "duplicates": int(np.count_nonzero(there)) - distinct(self.present),
            "skipped": dict(sorted(counts.skipped.items())),
            "dropped": dict(sorted(counts.dropped.items())),
        }

    def _total(self, column: npt.NDArray[np.uint32]) -> int:
        """The sum of a column, each document as often as it is there."""
        parts = (slice(start, start + _CHUNK) for start in range(0, len(column), _CHUNK))
        return sum(int(np.multiply(column[part], self.copies[part], dtype=np.int64).sum()) for part in parts)


def _records(follows: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64] | None:
    return np.cumsum(~follows, dtype=np.int64) if follows.any() else None
