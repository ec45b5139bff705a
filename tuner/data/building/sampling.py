"""The splits of prepared data, and which documents are trained on and how often, and which are held out.

The choice is a pure function of counts, hashes and the seed. A document is known by its digest, 128 bits of its token
ids' hash, as uint64[2]. Everything is a numpy table: no Python object stands for a document, and what is known of each
lies in a file, of which the system may take the pages back.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tuner.config.numbers import Duration
from tuner.data.batches import mixed, random_words
from tuner.data.building.encoded import TABLE, Counts, Tally
from tuner.data.building.spec import Source
from tuner.errors import DataError

Digests = npt.NDArray[np.uint64]
"""uint64[documents, 2]"""
_CHUNK = 1 << 16
_AT_ONCE = 1 << 25
_MOST = 2**31 - 1
_SAMPLE_STREAM = 1 << 63
"""Philox keys of samples are apart from those of epochs, which count from 0."""
_EVAL_SOURCES = 1 << 32
"""Held-out sources draw from other random words than training sources."""


def copies(source: Source, documents: int, seed: int, number: int) -> npt.NDArray[np.int32]:
    """Return int32[documents]: how often each document of a source is used.

    Whole passes first, then a sample without replacement. `number` is the source's place in the recipe: two sources
    draw independently. Raw Philox words are sorted, as for the order of rows: numpy promises them for ever.
    """
    if documents == 0:
        return np.zeros(0, dtype=np.int32)
    if source.total(documents) > _MOST:
        raise DataError(f"a source is to give {source.total(documents):,} documents, more than {_MOST:,}")
    passes, rest = divmod(source.total(documents), documents)
    taken = np.full(documents, passes, dtype=np.int32)
    if rest:
        taken[np.argsort(random_words(seed, _SAMPLE_STREAM + number, documents), kind="stable")[:rest]] += 1
    return taken


def distinct(*digests: Digests) -> int:
    """The number of different documents in all tables together.

    Takes 8 or 16 bytes a document of its own, of as many documents as are compared `_AT_ONCE`: those whose digests have
    the same first bits.
    """
    bits = (sum(map(len, digests)) // _AT_ONCE).bit_length()
    return sum(_distinct(digests, top, np.uint64(64 - bits)) for top in range(1 << bits))


def _distinct(digests: Sequence[Digests], top: int, shift: np.uint64) -> int:
    """The number of different documents whose first half, shifted, is `top`: by 64 bits, of all of them."""
    halves = (table[start : start + _CHUNK, 0] for table in digests for start in range(0, len(table), _CHUNK))
    none = np.empty(0, dtype=np.uint64)
    first = np.concatenate([none, *(chunk if shift == 64 else chunk[chunk >> shift == top] for chunk in halves)])
    first.sort()
    is_new = np.ones(len(first), dtype=np.bool_)
    np.not_equal(first[1:], first[:-1], out=is_new[1:])
    different = int(np.count_nonzero(is_new))
    if different == len(first):
        return different
    # What shares its first half with another differs from it in the second half, or not at all.
    again = first[:-1][is_new[:-1] & ~is_new[1:]]
    del first, is_new
    second = np.zeros(len(again), dtype=np.uint64)
    for part, at in _found(digests, again):
        second[at] = part[:, 1]
    others = {tuple(pair) for part, at in _found(digests, again) for pair in part[part[:, 1] != second[at]].tolist()}
    return different + len(others)


def _found(digests: Sequence[Digests], ordered: npt.NDArray[np.uint64]) -> Iterator[tuple[Digests, npt.NDArray[Any]]]:
    """The digests of which the first half is in `ordered`, and where, a part of the tables at a time."""
    for table in digests:
        for start in range(0, len(table), _CHUNK):
            part = table[start : start + _CHUNK]
            at = np.minimum(np.searchsorted(ordered, part[:, 0]), len(ordered) - 1)
            is_there = ordered[at] == part[:, 0]
            yield part[is_there], at[is_there]


def shared(left: Digests, right: Digests) -> int:
    """The number of different documents that are in both splits."""
    return distinct(left) + distinct(right) - distinct(left, right)


def hold_out(
    digests: Digests, amount: Duration, seed: int, records: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.bool_]:
    """Return bool[documents]: those held out. Equal documents go together, so none is in both splits.

    So do documents of one record: `records`, int64[documents], are the records' numbers where one may be several
    documents.
    Documents are visited in the order of a hash of their tokens, keyed by the seed; a group is held out where it still
    fits. DataError where nothing would be left in a split.
    """
    total = len(digests)
    wanted = math.floor(total * amount.count / 100 + 0.5) if amount.unit == "%" else int(amount.count)
    wanted = max(wanted, 1)
    if wanted >= total:
        raise DataError(
            f"data.eval: {amount} of {total:,} documents leaves none to train on",
            hint="give data.eval a file of its own",
        )
    order, sizes = _keyed_groups(digests, seed)
    if records is not None:
        order, sizes = _with_records(order, sizes, records)
    chosen = np.zeros(len(sizes), dtype=np.bool_)
    for start in range(0, len(sizes), _CHUNK):
        left = np.arange(start, min(start + _CHUNK, len(sizes)))
        while wanted and len(left):
            left = left[sizes[left] <= wanted]
            fits = int(np.searchsorted(np.cumsum(sizes[left]), wanted, side="right"))
            chosen[left[:fits]] = True
            wanted -= int(sizes[left[:fits]].sum())
            left = left[fits:]
    held = np.zeros(total, dtype=np.bool_)
    held[order] = np.repeat(chosen, sizes)
    if not held.any():
        raise DataError("data.eval: the documents repeat too often to hold any out", hint="give data.eval a file")
    return held


def _keyed_groups(digests: Digests, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The documents in the order of their keyed hash, and the sizes of the groups of equal ones that they come in."""
    key = np.frombuffer(hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16).digest(), dtype="<u8")
    hashed = np.empty(len(digests), dtype=np.uint64)
    for start in range(0, len(digests), _CHUNK):
        part = digests[start : start + _CHUNK]
        hashed[start : start + _CHUNK] = mixed(mixed(part[:, 0] ^ key[0]) ^ part[:, 1] ^ key[1])
    order = np.argsort(hashed, kind="stable").astype(np.int64, copy=False)
    hashed = hashed[order]
    # Two different documents of one hash would merely stay together.
    ends = np.flatnonzero(hashed[1:] != hashed[:-1]) + 1
    del hashed
    return order, np.diff(ends, prepend=0, append=len(order))


def _with_records(
    order: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], records: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Groups of documents made larger until each holds all documents of its records; in the order of first members."""
    group = np.empty(len(order), dtype=np.int64)
    group[order] = np.repeat(np.arange(len(sizes)), sizes)
    _, record = np.unique(records, return_inverse=True)
    first = np.arange(len(sizes))
    while True:  # the smallest number goes from group to record and from record to group until it stays
        of_record = np.full(int(record.max(initial=-1)) + 1, len(sizes))
        np.minimum.at(of_record, record, first[group])
        wider = first.copy()
        np.minimum.at(wider, group, of_record[record])
        if np.array_equal(wider, first):
            break
        first = wider
    joined = first[group]
    order = np.argsort(joined, kind="stable").astype(np.int64, copy=False)
    return order, np.unique(joined, return_counts=True)[1]


@dataclass
class SampledSplit:
    """The documents of `data.train` or `data.eval` as they are read: counts of sources, tables of bundles."""

    name: str
    sources: Sequence[Source]
    table: IO[bytes]
    """The tables of all bundles so far."""
    holds_out: bool = False
    """Whether documents are held out of it."""
    counts: list[Counts] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    size: int = 0
    first_bad: DataError | None = None
    """What is wrong with the first row that was left out."""

    def __post_init__(self) -> None:
        self.counts = [Counts() for _ in self.sources]

    @property
    def by_source(self) -> bool:
        """Whether each source goes to a file of its own, of which its share is then taken."""
        return not all(source.is_whole for source in self.sources)

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
        found = Counter[Path]()
        for source, counts in enumerate(self.counts):
            found[self.path(directory, source)] += counts.documents
        return list(found.items())

    def taken(self, seed: int) -> "SplitSelection":
        """The documents as the shares of its sources say."""
        size = self.table.tell() // TABLE.itemsize
        self.table.flush()
        table = np.asarray(np.memmap(self.table, TABLE, "r", shape=(size,)) if size else np.empty(0, TABLE))
        if not self.by_source:
            return SplitSelection(table, np.broadcast_to(np.int32(1), size))
        base = _EVAL_SOURCES if self.name == "eval" else 0
        often = []
        for number, (source, counts) in enumerate(zip(self.sources, self.counts, strict=True)):
            drawn_by, stream = (seed, base + number) if source.seed is None else (source.seed, base)
            often.append(copies(source, counts.documents, drawn_by, stream))
        return SplitSelection(table, np.concatenate(often))


@dataclass(frozen=True)
class SplitSelection:
    """Documents of one split: their tables, and how often each is there."""

    table: npt.NDArray[np.void]
    """TABLE[documents]"""
    copies: npt.NDArray[np.int32]

    @property
    def records(self) -> npt.NDArray[np.int64] | None:
        """int64[documents]: the number of each document's record; None where each record is one document."""
        follows = self.table["follows"]
        return np.cumsum(~follows, dtype=np.int64) if follows.any() else None

    @property
    def present(self) -> Digests:
        """The digests of the documents that are there."""
        digests: Digests = self.table["digest"]
        return digests if self.copies.all() else digests[self.copies > 0]

    def held_out(self, amount: Duration, seed: int) -> "list[SplitSelection]":
        """Hold documents out of those that are taken; what is held out is there once and not trained on."""
        held = np.zeros(len(self.copies), dtype=np.bool_)
        there = self.copies > 0
        records = self.records
        held[there] = hold_out(self.present, amount, seed, None if records is None else records[there])
        parts = (np.where(held, 0, self.copies), held.astype(np.int32))
        return [replace(self, copies=often.astype(np.int32)) for often in parts]

    def records_there(self) -> int:
        """Records of which a document is there, each as often as its documents are, where it is one document."""
        records = self.records
        return int(self.copies.sum()) if records is None else len(np.unique(records[self.copies > 0]))

    def report(self, counts: Counts) -> dict[str, Any]:
        """The split's counts as JSON values; documents and tokens as often as they are trained on."""
        there = self.copies > 0
        return {
            "rows": counts.records, "documents": int(self.copies.sum()), "tokens": self._total("length"),
            "trained": self._total("targets"),
            "longest": int(self.table["length"].max(initial=0, where=there)),
            "duplicates": int(np.count_nonzero(there)) - distinct(self.present),
            "skipped": dict(sorted(counts.skipped.items())),
            "dropped": dict(sorted(counts.dropped.items())),
        }

    def _total(self, name: str) -> int:
        """The sum of a column, each document as often as it is there."""
        column = self.table[name]
        parts = (slice(start, start + _CHUNK) for start in range(0, len(column), _CHUNK))
        return sum(int(np.multiply(column[part], self.copies[part], dtype=np.int64).sum()) for part in parts)
