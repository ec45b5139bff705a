"""Where turns lie among tokens, and the documents that they become: of one text at a time, and of many end to end.

The exact way is by the tokenizer's own character spans, one text at a time: for every kind of tokenizer, for records
that the faster way cannot take, for people who want to see each token's rule, and as the judge of a sample of the
faster way's records. That one lays many texts end to end, and finds the turns by their bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
import numpy.typing as npt

from tuner.data.encoding.tokenizer import ByteTable, Encoded, TextTokenizer
from tuner.data.encoding.turns import BREAK, GUARD, Planner, Plans, TrainOn, Turn, TurnPlan
from tuner.data.ranges import Ints, offsets_of, ranges
from tuner.data.reading.examples import Conversation, Example, Tokens
from tuner.data.reading.problems import RecordProblem

KEPT_PROMPTS, KEPT_CHARS = 4096, 256
"""Prompts of fewer characters are encoded once, as many as this."""
LONG_CHARS = 1 << 18
"""From here on the tokenizer's own spans, 370 bytes a character, are avoided where that can be."""
_READ_TOKENS = 1 << 15
APART = "answers encoded separately from their prompt: a token would span the end of it"


class TokenSpan(NamedTuple):
    """Tokens [start, stop) and why they are trained or not."""

    start: int
    stop: int
    rule: str


@dataclass(frozen=True)
class Document:
    """One encoded example of n tokens."""

    input_ids: npt.NDArray[np.int64]
    """int64[n]"""
    trained: npt.NDArray[np.bool_]
    """bool[n]"""
    prompt_tokens: int
    """Tokens before the last answer, as a model is prompted with them; 0 where there is none."""
    spans: list[TokenSpan]
    apart: bool = False
    """Whether the prompt's tokens and the answer's are of two texts that were encoded one by one."""


class Placer:
    """Places plans on tokens for a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._everything = train_on == "all"
        self._special = np.array(sorted(tokenizer.special_ids), dtype=np.int64)
        self._prompts: dict[str, list[int]] = {}
        suffix = list(tokenizer.text_suffix)
        if tokenizer.eos_id is not None and tokenizer.eos_id not in suffix:
            suffix.append(tokenizer.eos_id)
        self.frame: tuple[list[int], list[int]] = (list(tokenizer.text_prefix), suffix)
        """Ids before and after a text that no template writes."""
        self.long: Callable[[str], Encoded | None] = lambda _: None
        """What encodes a long text in less memory, to the same ids and characters; None for a text that it cannot."""

    def place(self, plan: TurnPlan) -> Document:
        """Return the document of a plan. Raises RecordProblem where a turn does not end between two tokens."""
        guarded, encoded = plan, self._encoded(plan.text, plan.escaped)
        if plan.escaped:
            plan = _unguarded(plan)
        trained = np.full(len(encoded.ids), plan.default, dtype=np.bool_)
        spans = [TokenSpan(0, len(trained), plan.default_rule)]
        prompt_tokens = 0
        for turn in plan.turns:
            start, stop = _boundary(encoded, turn.start), _boundary(encoded, turn.stop)
            straddles = start is None or stop is None
            if straddles or (turn.is_answer and not self._prompt_is_exact(plan, encoded, turn, start or 0)):
                if plan.apart:
                    del encoded, trained  # those of a long text take as much as what follows
                    return self._apart(guarded)
                if turn.trained == plan.default:
                    continue  # nothing is masked; all that is lost is a prompt for a sample
                other = f"the tokens before the {turn.rule} are not those of its prompt alone"
                what = f"a token reaches over an end of the {turn.rule}" if straddles else other
                raise RecordProblem(f"{what}: its mask cannot be exact", 1)
            first, last = int(start or 0), int(stop or 0)
            prompt_tokens = first if turn.is_answer else prompt_tokens
            trained[first:last] = turn.trained
            spans.append(TokenSpan(first, last, turn.rule))
        document = Document(encoded.ids, trained, prompt_tokens, spans)
        return self._framed(document, plan) if plan.framed else document

    def tokens(self, example: Tokens) -> Document:
        """Return the document of a record that is tokens already. Raises RecordProblem for an id out of range."""
        ids = np.array(example.input_ids, dtype=np.int64)
        if len(ids) and (int(ids.max()) >= self._tokenizer.vocab_size or int(ids.min()) < 0):
            at = int(np.argmax((ids < 0) | (ids >= self._tokenizer.vocab_size)))
            if example.place is not None:
                where = f"id {int(ids[at])} at position {example.place + at:,} of the array"
                raise RecordProblem(f"{where} is not in the vocabulary", 1)
            raise RecordProblem(f"id {int(ids[at])} is not in the vocabulary", path=("input_ids", at))
        given = None if self._everything else example.trained
        trained = np.ones(len(ids), dtype=np.bool_) if given is None else np.array(given, dtype=np.bool_)
        first = int(np.argmax(trained)) if trained.any() else 0
        changes = [] if given is None else (np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist()
        edges = [0, *changes, len(ids)]
        rules = ("not trained", "trained") if given is not None else ("tokens", "tokens")
        spans = [TokenSpan(a, b, rules[int(trained[a])]) for a, b in zip(edges, edges[1:], strict=False) if b > a]
        return Document(ids, trained, first or len(ids) // 2, spans)

    def _prompt_is_exact(self, plan: TurnPlan, encoded: Encoded, turn: Turn, start: int) -> bool:
        """Whether the text before an answer, encoded alone, gives the ids that stand before it."""
        if start == 0:
            return True
        special = np.flatnonzero(np.isin(encoded.ids[:start], self._special))
        # A control token cuts the text: what follows it is encoded without regard to what precedes.
        first = int(special[-1]) if len(special) else 0
        tail = plan.text[int(encoded.starts[first]) : turn.start]
        ids = self._prompts.get(tail)
        if ids is None:
            ids = self._tokenizer.encode(tail)
            if len(self._prompts) < KEPT_PROMPTS and len(tail) < KEPT_CHARS:
                self._prompts[tail] = ids
        if np.array_equal(ids, encoded.ids[first:start]):
            return True
        return first > 0 and np.array_equal(self._tokenizer.encode(plan.text[: turn.start]), encoded.ids[:start])

    def _encoded(self, text: str, guarded: bool) -> Encoded:
        """Encode a text; where it is guarded, with the guards taken out. RecordProblem.

        As transformers' `sanitize_control_tokens` does: a token that a user wrote out is encoded by itself, as ordinary
        characters, and what stands between two of them as always.
        """
        if not guarded:
            found = self.long(text) if len(text) >= LONG_CHARS else None
            return self._tokenizer.encode_batch([text])[0] if found is None else found
        parts: list[Encoded] = []
        texts: list[str] = []
        length = 0
        for k, piece in enumerate(text.split(GUARD)):
            if k % 2:  # between an odd guard and the next stands a written-out token
                if piece.count(BREAK) != 1:
                    raise RecordProblem("the template cuts a control token that is written out in the text", 1)
                piece = piece.replace(BREAK, "")  # noqa: PLW2901 (the same piece, as it was written)
            part = self._tokenizer.encode_escaped(piece) if k % 2 else self._tokenizer.encode_batch([piece])[0]
            parts.append(Encoded(part.ids, part.starts + length, part.stops + length))
            texts.append(piece)
            length += len(piece)
        read = self._tokenizer.decode([int(i) for part in parts for i in part.ids])
        if normalize("NFC", read) != normalize("NFC", "".join(texts)):
            raise RecordProblem("with its control tokens escaped the text would read otherwise", 1)
        ids, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Encoded(ids, starts, stops)

    def _apart(self, plan: TurnPlan) -> Document:
        """Encode prompt and answer one by one: the prompt's ids are then those of the prompt alone. RecordProblem."""
        answer = plan.turns[-1]
        prompt = self._encoded(plan.text[: answer.start], plan.escaped)
        rest = self._encoded(plan.text[answer.start :], plan.escaped)
        clean = _unguarded(plan) if plan.escaped else plan
        answer = clean.turns[-1]
        ids, cut = np.concatenate([prompt.ids, rest.ids]), len(prompt.ids)
        # Of a long text that is not guarded every character has its token: decoding it would take all memory.
        is_read = not plan.escaped and len(plan.text) >= LONG_CHARS and self._is_whole(prompt, rest, plan.text)
        if not is_read and self._tokenizer.decode(ids.tolist()) != clean.text:
            what = "a token reaches over the end of the prompt: its mask cannot be exact"
            raise RecordProblem(what, None, ("completion",)) if plan.framed else RecordProblem(what, 1)
        end = _boundary(rest, answer.stop - answer.start)
        if end is None:
            raise RecordProblem(f"a token reaches over an end of the {answer.rule}: its mask cannot be exact", 1)
        trained = np.full(len(ids), plan.default, dtype=np.bool_)
        trained[cut : cut + end] = answer.trained
        del prompt, rest
        spans = [TokenSpan(0, len(ids), "prompt"), TokenSpan(cut, cut + end, answer.rule)]
        document = Document(ids, trained, cut, spans, apart=True)
        return self._framed(document, plan) if plan.framed else document

    def _is_whole(self, prompt: Encoded, rest: Encoded, text: str) -> bool:
        """Whether the two read as the text, decoded in parts that begin and end between characters."""
        read = 0
        for part in (prompt, rest):
            base, first, count = read, 0, len(part.ids)
            while first < count:
                last = min(first + _READ_TOKENS, count)
                while last < count and part.starts[last] < part.stops[last - 1]:
                    last += 1
                stop = base + int(part.stops[last - 1])
                if self._tokenizer.decode(part.ids[first:last].tolist()) != text[read:stop]:
                    return False
                first, read = last, stop
        return read == len(text)

    def _framed(self, document: Document, plan: TurnPlan) -> Document:
        prefix, suffix = self.frame[0], self.frame[1] if plan.ends else []
        ids = np.concatenate([prefix, document.input_ids, suffix]).astype(np.int64, copy=False)
        ends = (np.full(len(prefix), plan.default), np.ones(len(suffix), dtype=np.bool_))
        trained = np.concatenate([ends[0], document.trained, ends[1]]).astype(np.bool_, copy=False)
        spans = [TokenSpan(0, len(prefix), "start of text")] if prefix else []
        spans += [TokenSpan(s.start + len(prefix), s.stop + len(prefix), s.rule) for s in document.spans]
        spans += [TokenSpan(len(ids) - len(suffix), len(ids), "end of text")] if suffix else []
        whole = not any(span.rule == "completion" for span in document.spans)
        prompt = len(prefix) + (len(document.input_ids) // 2 if whole else document.prompt_tokens)
        return Document(ids, trained, prompt, spans, document.apart)


def _unguarded(plan: TurnPlan) -> TurnPlan:
    """The plan of the text without its guards."""
    text = plan.text

    def clean(position: int) -> int:
        return position - text.count(GUARD, 0, position) - text.count(BREAK, 0, position)

    turns = [turn._replace(start=clean(turn.start), stop=clean(turn.stop)) for turn in plan.turns]
    return plan._replace(text=text.replace(GUARD, "").replace(BREAK, ""), turns=turns)


def _boundary(encoded: Encoded, char: int) -> int | None:
    """Index of the first token at or after a character, or None where a token straddles it."""
    index = int(np.searchsorted(encoded.starts, char, side="left"))
    return None if index and int(encoded.stops[:index].max()) > char else index


class Placed(NamedTuple):
    """The documents of one example."""

    documents: list[Document]
    left_out: tuple[str, ...]
    """The reasons of answers that have no document, where each answer of a conversation is one."""


class Alone:
    """Documents of examples by their number, the problems of those that have none, and what is to be said of them."""

    def __init__(self, planner: Planner, placer: Placer) -> None:
        self.documents: dict[int, list[Document]] = {}
        self.problems: dict[int, RecordProblem] = {}
        self.by_answer: dict[int, tuple[str, ...]] = {}
        """Conversations of which each answer is a document -> the reasons of answers that have none."""
        self.notes: dict[int, tuple[str, ...]] = {}
        self.escaped = 0
        self._planner = planner
        self._placer = placer

    def place(self, i: int, example: Example, plans: Plans | None = None) -> None:
        """Place example `i`, whose plans may be known."""
        self.by_answer.pop(i, None)
        try:
            if isinstance(example, Tokens):
                self.documents[i] = [self._placer.tokens(example)]
            else:
                self._place(i, example, self._planner.plans(example) if plans is None else plans)
        except RecordProblem as problem:
            self.problems[i] = problem

    def note(self, i: int, notes: Iterable[str]) -> None:
        """Say this of example `i`, in the place of what was said before."""
        self.notes[i] = tuple(dict.fromkeys(notes))

    def counted(self) -> Counter[str]:
        """How many examples each note is about; not those that have a problem."""
        return Counter(note for i, notes in self.notes.items() if i not in self.problems for note in notes)

    def _place(self, i: int, example: Example, plans: Plans) -> None:
        documents: list[Document] = []
        refused: list[RecordProblem] = []
        for plan in plans.plans:
            try:
                documents.append(self._placer.place(plan))
            except RecordProblem as problem:
                refused.append(problem)
        if not documents and not plans.by_answer and isinstance(example, Conversation):
            answers = self._planner.by_answer(example, self._planner.readable(example), refused[0])
            self._place(i, example, answers)
            return
        if not documents:
            raise refused[0]
        self.documents[i] = documents
        if plans.by_answer:
            self.by_answer[i] = (*plans.left_out, *(problem.kind for problem in refused))
        notes = [note for plan in plans.plans for note in plan.notes]
        if not plans.plans[0].framed and any(document.apart for document in documents):
            notes.append(APART)
        self.note(i, notes)
        self.escaped += sum(plan.escaped for plan in plans.plans)


Edges = npt.NDArray[np.int32] | npt.NDArray[np.int64]
"""Running sums over tokens, in 32 bits wherever they fit."""
_LOOKED_UP = 1 << 18


TEXT = np.dtype([(name, "<i8") for name in ("example", "size", "specials")] + [("default", "?"), ("frame", "?", 2)])
"""A text: its example, its bytes, the control tokens that the template wrote (-1 where that was looked at before),
whether tokens outside of turns are trained, and whether it has a frame, and an end token in that."""
TURN = np.dtype([("text", "<i8"), ("start", "<i8"), ("stop", "<i8"), ("trained", "?"), ("answer", "?")])
"""A turn: the number of its text, where it begins and ends there in bytes, whether it is trained, and is an answer."""


class BatchTexts:
    """Texts of a batch with the bytes at which their turns begin and end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.rows: list[tuple[int, int, int, bool, tuple[bool, bool]]] = []
        """TEXT of each text."""
        self.turns: list[tuple[int, int, int, bool, bool]] = []
        """TURN[turns]"""
        self.prompts: list[str] = []
        """Of each turn the text before it, from the last control token on; empty where it is no answer."""

    def add(self, text: str, example: int, size: int, specials: int, default: bool, frame: tuple[bool, bool]) -> None:
        """Add a text, whose turns have been added; what is known of it is as in TEXT."""
        self.texts.append(text)
        self.rows.append((example, size, specials, default, frame))

    def turn(self, span: tuple[int, int], trained: bool, answer: bool, prompt: str) -> None:
        """Add a turn of the text that is added next, by its bytes."""
        self.turns.append((len(self.texts), *span, trained, answer))
        self.prompts.append(prompt)


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


class Turns(NamedTuple):
    """The turns of a batch by tokens."""

    text: Ints
    first: Ints
    last: Ints
    """One after the last token."""
    straddles: npt.NDArray[np.bool_]
    """Whether a token reaches over an end."""
    trained: npt.NDArray[np.bool_]
    answer: npt.NDArray[np.bool_]

    @staticmethod
    def of(texts: BatchTexts, flat: Flat) -> "Turns":
        """Find the tokens at which the turns of `texts` begin and end."""
        turns = np.array(texts.turns, dtype=TURN)
        text = np.ascontiguousarray(turns["text"])
        base = flat.edges[flat.offsets[:-1]][text]
        top = len(flat.edges) - 1
        # Of the edges' own type: else they would all be converted to find a few among them.
        starts, stops = (base + turns[name].astype(base.dtype) for name in ("start", "stop"))
        first = np.minimum(np.searchsorted(flat.edges, starts), top)
        last = np.minimum(np.searchsorted(flat.edges, stops), top)
        straddles = (flat.edges[first] != starts) | (flat.edges[last] != stops)
        return Turns(text, first, last, straddles, turns["trained"], turns["answer"])

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
    if batch is None:
        nothing = np.empty(0, dtype=np.int64)
        none, no_flags = nothing.astype(np.uint32), nothing.astype(np.bool_)
        batch = EncodedBatch(none, no_flags, offsets_of(nothing), none, nothing)
    if not placed:
        return batch
    documents = [document for i in sorted(placed) for document in placed[i]]
    facts = [(i, len(each.input_ids), each.prompt_tokens) for i in sorted(placed) for each in placed[i]]
    own, sizes, prompts = np.array(facts, dtype=np.int64).T
    ids = np.concatenate([batch.input_ids, *(document.input_ids.astype(np.uint32) for document in documents)])
    trained = np.concatenate([batch.trained, *(document.trained for document in documents)])
    lengths = np.concatenate([np.diff(batch.offsets), sizes])
    records = np.concatenate([batch.records, own])
    order = np.argsort(records, kind="stable")
    at = ranges(offsets_of(lengths)[:-1][order], lengths[order])
    prompts = np.concatenate([batch.prompt_tokens, prompts.astype(np.uint32)])[order]
    return replace(
        batch, input_ids=ids[at], trained=trained[at], offsets=offsets_of(lengths[order]), prompt_tokens=prompts,
        records=records[order],
    )  # fmt: skip
