"""Many texts end to end: the bytes of their turns, where tokens lie between them, and the documents they become."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tuner.data.encoding.place import Document
from tuner.data.encoding.tokenizer_json import ByteTable
from tuner.data.ranges import Ints, offsets_of, ranges
from tuner.data.reading.problems import RecordProblem

Edges = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Running sums over tokens, in 32 bits wherever they fit."""
_LOOKED_UP = 1 << 18


class BatchTexts:
    """Texts of a batch with the bytes at which their turns begin and end."""

    def __init__(self) -> None:
        self.examples: list[int] = []
        self.pieces: list[str] = []
        self.sizes: list[int] = []
        self.default: list[bool] = []
        self.framed: list[bool] = []
        self.ends: list[bool] = []
        self.specials: list[int] = []
        """Control tokens that the template wrote; -1 where that was looked at before."""
        self.piece_stops: list[int] = []
        self.text: list[int] = []
        self.start: list[int] = []
        self.stop: list[int] = []
        self.trained: list[bool] = []
        self.answer: list[bool] = []
        self.prompt: list[str] = []
        """Text before an answer, from the last control token on; empty where the turn is no answer."""

    def close(self, example: int, size: int, default: bool, specials: int, frame: tuple[bool, bool]) -> None:
        """End a text whose pieces and turns have been added; `frame`: whether it has one, and an end token in it."""
        self.piece_stops.append(len(self.pieces))
        self.examples.append(example)
        self.sizes.append(size)
        self.default.append(default)
        self.framed.append(frame[0])
        self.ends.append(frame[1])
        self.specials.append(specials)

    def turn(self, span: tuple[int, int], trained: bool, answer: bool, prompt: str) -> None:
        """Add a turn of the text that is open, by its bytes."""
        self.text.append(len(self.examples))
        self.start.append(span[0])
        self.stop.append(span[1])
        self.trained.append(trained)
        self.answer.append(answer)
        self.prompt.append(prompt)


@dataclass(frozen=True)
class Flat:
    """The ids of n texts end to end, and the bytes between which each lies."""

    ids: npt.NDArray[np.uint32]
    lengths: Ints
    """Tokens of each text."""
    offsets: Ints
    edges: Edges
    """[tokens + 1]: bytes, from the first text's first."""
    unknown: npt.NDArray[np.bool_]
    """bool[n]: texts whose ids do not stand for their bytes."""

    @staticmethod
    def of(ids: npt.NDArray[np.uint32], lengths: Ints, table: ByteTable) -> "Flat":
        """Lay ids out by what they stand for; `lengths` are the tokens of each text."""
        unknown = np.zeros(len(lengths), dtype=np.bool_)
        return Flat(ids, lengths, offsets_of(lengths), edges_of(ids, table), unknown)

    def counts(self, of: npt.NDArray[np.bool_]) -> Ints:
        """int64[n]: how many ids of each text are marked in `of`, a table by id."""
        found = [start + np.flatnonzero(of[part]) for start, part in _parts(self.ids)]
        return np.diff(np.searchsorted(np.concatenate([np.empty(0, dtype=np.int64), *found]), self.offsets))


@dataclass(frozen=True)
class Turns:
    """The turns of a batch by tokens."""

    text: Ints
    first: Ints
    last: Ints
    """One after the last token."""
    straddles: npt.NDArray[np.bool_]
    """Whether a token reaches over an end."""

    @staticmethod
    def of(texts: BatchTexts, flat: Flat) -> "Turns":
        """Find the tokens at which the turns of `texts` begin and end."""
        text = np.array(texts.text, dtype=np.int64)
        base = flat.edges[flat.offsets[:-1]][text]
        top = len(flat.edges) - 1
        # Of the edges' own type: else they would all be converted to find a few among them.
        starts, stops = base + np.array(texts.start, dtype=base.dtype), base + np.array(texts.stop, dtype=base.dtype)
        first = np.minimum(np.searchsorted(flat.edges, starts), top)
        last = np.minimum(np.searchsorted(flat.edges, stops), top)
        straddles = (flat.edges[first] != starts) | (flat.edges[last] != stops)
        return Turns(text, first, last, straddles)

    def follow(self, which: Ints, flat: Flat, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Whether `ids` stand before each of the turns, in its own text."""
        before = self.first[which] - len(ids)
        inside = before >= flat.offsets[:-1][self.text[which]]
        at = np.maximum(before, 0)[:, None] + np.arange(len(ids))
        found: npt.NDArray[np.bool_] = inside & (flat.ids[np.minimum(at, len(flat.ids) - 1)] == ids).all(axis=1)
        return found

    def cover(self, which: npt.NDArray[np.bool_], tokens: int) -> npt.NDArray[np.bool_]:
        """bool[tokens]: the tokens of the chosen turns."""
        depth = np.zeros(tokens + 1, dtype=np.int32)
        np.add.at(depth, self.first[which], 1)
        np.subtract.at(depth, self.last[which], 1)
        np.cumsum(depth, out=depth)
        covered: npt.NDArray[np.bool_] = depth[:tokens] > 0
        return covered


def edges_of(ids: npt.NDArray[np.uint32], table: ByteTable) -> Edges:
    """The sums of the bytes that the first 0, 1, ... ids stand for; a long text may have one for every byte."""
    lengths = np.zeros(len(ids) + 1, dtype=np.int32)
    for start, part in _parts(ids):
        lengths[start + 1 : start + 1 + len(part)] = table.lengths[part]
    if int(lengths.sum(dtype=np.int64)) > np.iinfo(np.int32).max:
        return np.cumsum(lengths, dtype=np.int64)
    return np.cumsum(lengths, out=lengths)


def _parts(ids: npt.NDArray[np.uint32]) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Some ids at a time, and where they begin: to look values up, numpy makes 64 bits of each."""
    for start in range(0, len(ids), _LOOKED_UP):
        yield start, ids[start : start + _LOOKED_UP]


@dataclass(frozen=True)
class EncodedBatch:
    """n documents, flat, in the order of the examples that they come from."""

    input_ids: npt.NDArray[np.uint32]
    """uint32[tokens]"""
    trained: npt.NDArray[np.bool_]
    """bool[tokens]: whether the token itself is to be learned."""
    offsets: Ints
    """int64[n + 1]"""
    prompt_tokens: npt.NDArray[np.uint32]
    """uint32[n]: tokens before the last answer, as a model is prompted with them; 0 where there is none."""
    records: Ints
    """int64[n]: the example that each document comes from, ascending; those of one example are in its order."""
    problems: dict[int, RecordProblem] = field(default_factory=dict)
    """Example -> why there is no document."""
    fast: int = 0
    """Documents whose ids the fast encoder gave."""
    escaped: int = 0
    """Documents in which a written-out control token was encoded as ordinary characters."""
    notes: Counter[str] = field(default_factory=Counter)
    by_answer: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Conversations of which each answer is a document -> the reasons of answers that have none."""
    columns: Mapping[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """[n] each: what is known of a document besides its tokens."""

    def only(self, keep: npt.NDArray[np.bool_]) -> "EncodedBatch":
        """The documents that are marked, bool[n], with all that is said of the batch."""
        if keep.all():
            return self
        lengths = np.diff(self.offsets)
        tokens = np.repeat(keep, lengths)
        return replace(
            self, input_ids=self.input_ids[tokens], trained=self.trained[tokens], offsets=offsets_of(lengths[keep]),
            prompt_tokens=self.prompt_tokens[keep], records=self.records[keep],
            columns={name: values[keep] for name, values in self.columns.items()},
        )  # fmt: skip


def joined(batch: EncodedBatch | None, placed: dict[int, list[Document]]) -> EncodedBatch:
    """One batch of documents that were encoded together and others, by the order of their examples."""
    extra = [i for i in sorted(placed) for _ in placed[i]]
    documents = [document for i in sorted(placed) for document in placed[i]]
    ids = [document.input_ids.astype(np.uint32) for document in documents]
    trained = [document.trained for document in documents]
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    prompts = np.array([document.prompt_tokens for document in documents], dtype=np.uint32)
    records = np.array(extra, dtype=np.int64)
    if batch is not None and not extra:
        return batch
    if batch is not None:
        ids, trained = [batch.input_ids, *ids], [batch.trained, *trained]
        lengths = np.concatenate([np.diff(batch.offsets), lengths])
        prompts = np.concatenate([batch.prompt_tokens, prompts])
        records = np.concatenate([batch.records, records])
    order = np.argsort(records, kind="stable")
    starts = offsets_of(lengths)[:-1][order]
    offsets, at = offsets_of(lengths[order]), ranges(starts, lengths[order])
    flat_ids = np.concatenate([np.empty(0, dtype=np.uint32), *ids])
    flat_trained = np.concatenate([np.empty(0, dtype=np.bool_), *trained])
    return EncodedBatch(
        flat_ids[at], flat_trained[at], offsets, prompts[order], records[order], fast=0 if batch is None else batch.fast
    )
