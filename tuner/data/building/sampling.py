"""Which documents are trained on and how often, and which are held out: pure functions of counts, hashes and the seed.

A document is known by its digest, 128 bits of its token ids' hash, as uint64[2]. Everything is a numpy table: no
Python object stands for a document.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.duration import Duration
from tuner.data.building.spec import Share
from tuner.errors import DataError

Digests = npt.NDArray[np.uint64]
"""uint64[documents, 2]"""
_MASK64 = (1 << 64) - 1
_CHUNK = 1 << 16
_MOST = 2**31 - 1
_SAMPLE_STREAM = 1 << 63
"""Philox keys of samples are apart from those of epochs, which count from 0."""


def copies(share: Share, documents: int, seed: int, source: int) -> npt.NDArray[np.int32]:
    """Return int32[documents]: how often each document of a source is taken.

    Whole passes first, then a sample without replacement. `source` is the source's place in the recipe: two sources
    draw independently. Raw Philox words are sorted, as for the order of rows: numpy promises them for ever.
    """
    if documents == 0:
        return np.zeros(0, dtype=np.int32)
    if share.total(documents) > _MOST:
        raise DataError(f"a source is to give {share.total(documents):,} documents, more than {_MOST:,}")
    passes, rest = divmod(share.total(documents), documents)
    taken = np.full(documents, passes, dtype=np.int32)
    if rest:
        key = np.array([seed & _MASK64, _SAMPLE_STREAM + source], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(documents)
        taken[np.argsort(words, kind="stable")[:rest]] += 1
    return taken


def distinct(*digests: Digests) -> int:
    """The number of different documents in all tables together; takes 8 or 16 bytes a document of its own."""
    first = np.concatenate([table[:, 0] for table in digests])
    first.sort()
    is_new = np.ones(len(first), dtype=np.bool_)
    np.not_equal(first[1:], first[:-1], out=is_new[1:])
    halves = int(np.count_nonzero(is_new))
    if halves == len(first):
        return halves
    # What shares its first half with another differs from it in the second half, or not at all.
    again = first[:-1][is_new[:-1] & ~is_new[1:]]
    del first, is_new
    second = np.zeros(len(again), dtype=np.uint64)
    for part, at in _found(digests, again):
        second[at] = part[:, 1]
    others = {tuple(pair) for part, at in _found(digests, again) for pair in part[part[:, 1] != second[at]].tolist()}
    return halves + len(others)


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
    Documents are visited in the order of a hash of their tokens, keyed by the seed; a group is taken where it still
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


def digest(ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> Digests:
    """Return the digests of documents that lie one after another: ids uint32[tokens], offsets int64[documents + 1]."""
    words = np.ascontiguousarray(ids, dtype="<u4").data.cast("B")
    bounds: Sequence[int] = (offsets * 4).tolist()
    hashes = b"".join(
        hashlib.blake2b(words[start:stop], digest_size=16).digest()
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    )
    return np.frombuffer(hashes, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def _keyed_groups(digests: Digests, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The documents in the order of their keyed hash, and the sizes of the groups of equal ones that they come in."""
    key = np.frombuffer(hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16).digest(), dtype="<u8")
    hashed = np.empty(len(digests), dtype=np.uint64)
    for start in range(0, len(digests), _CHUNK):
        part = digests[start : start + _CHUNK]
        hashed[start : start + _CHUNK] = _mixed(_mixed(part[:, 0] ^ key[0]) ^ part[:, 1] ^ key[1])
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


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input reaches every bit of the output."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
