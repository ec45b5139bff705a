"""Examples to token ids and loss masks that are proven, many at a time.

The texts of a batch are encoded in one piece, with a control token between them. A byte-level token stands for known
bytes, so the running sum of lengths says where each token lies, and the turns' ends are found by binary search for
all records together: no token may straddle one, and before an answer must stand the very ids that the prompt alone has.
What does not go this way (other kinds of tokenizers, control tokens written out by users, bytes that a tokenizer does
not know) is placed one by one from the tokenizer's own character spans.

Of pairs of answers and labelled answers each answer is encoded as one that is learned by itself. Both documents of a
pair have the same ids before the answer: the prompt's own, since before every trained answer stand the ids that its
prompt alone has. A record of which that cannot be shown for both answers is refused.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby, zip_longest

import numpy as np
import numpy.typing as npt

from tuner.config.methods import ExampleKind
from tuner.data.encoding import place
from tuner.data.encoding.fast import FastEncoder, ProvenEncoder, WordEncoder
from tuner.data.encoding.place import Alone, BatchTexts, EncodedBatch, Flat, Placed, Placer, Turns, joined
from tuner.data.encoding.template_layout import Shape, TemplateLayouts
from tuner.data.encoding.template_spy import has_reserved
from tuner.data.encoding.tokenizer import ByteTable, Encoded, TextTokenizer, Unproven
from tuner.data.encoding.turns import Planner, SpecialTokens, TrainOn, TurnPlan
from tuner.data.ranges import Ints, offsets_of, ranges
from tuner.data.reading.examples import Conversation, Example, Labelled, Learned, Pair, Tokens, answers_of
from tuner.data.reading.problems import RecordProblem

FAST_FROM_BYTES = 256 << 10
"""A batch of fewer bytes is not worth building and proving the fast encoder for."""
CHECKS = 5
"""Records of a batch that are placed alone and compared, besides every `_CHECK_EVERY`th."""
_CHECK_EVERY = 997
_CHECK_TOKENS = 1 << 15


class FastEncoderMismatch(Exception):
    """A record of the sample came out otherwise than the tokenizer alone gives it."""


class Encoder:
    """Encodes examples for a tokenizer and a method."""

    def __init__(
        self, tokenizer: TextTokenizer, train_on: TrainOn, special_tokens: SpecialTokens = "refuse", fast: bool = True
    ) -> None:
        """`train_on` is the recipe's, and `all` for pre-training; without `fast` every record is placed one by one."""
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._planner = Planner(tokenizer, train_on, special_tokens)
        self._placer = Placer(tokenizer, train_on)
        self._layouts = TemplateLayouts(tokenizer, self._planner)
        self._proven: ProvenEncoder | None = None
        self._chosen = False
        self._table: ByteTable | None = None
        self._separator = ""
        self._prompts: dict[str, npt.NDArray[np.uint32]] = {}
        with suppress(Unproven):
            if fast:
                self._table = tokenizer.byte_table
                self._is_special = np.zeros(len(self._table.lengths), dtype=np.bool_)
                self._is_special[list(tokenizer.special_ids)] = True
                self._is_unknown = np.arange(len(self._table.lengths)) >= self._table.size
                self._separator = next((tokenizer.decode([i]) for i in sorted(tokenizer.special_ids)), "")

    def encode(self, examples: Sequence[Example], total_bytes: int | None = None, checks: int = CHECKS) -> EncodedBatch:
        """Encode examples, in order; one that cannot be used gives its problem.

        Where they are a part of records that were cut for the sake of memory, `total_bytes` are those of all parts:
        it decides about the fast encoder. Of each part `checks` records are placed alone too and compared. Raises
        DataError without a chat template, FastEncoderMismatch where the sample refutes the fast path.
        """
        texts, alone = BatchTexts(), Alone(self._planner, self._placer)
        for i, example in enumerate(examples):
            try:
                if not (isinstance(example, Conversation) and self._add_known(texts, i, example, alone)):
                    self._add(texts, i, example, alone)
            except RecordProblem as problem:
                alone.problems[i] = problem
        merged = joined(self._encode_texts(texts, examples, alone, total_bytes), alone.documents)
        self._check(examples, merged, checks)
        return replace(
            merged, problems=alone.problems, escaped=alone.escaped, notes=alone.counted(), by_answer=alone.by_answer
        )

    def choose(self) -> None:
        """Build and prove the fast encoder now, and not with the first records that are worth it."""
        if self._table is not None:
            self._proven_for(FAST_FROM_BYTES, self._table)

    def explain(self, example: Example) -> Placed:
        """Encode one example with the rule of every token. Raises RecordProblem."""
        alone = Alone(self._planner, self._placer)
        alone.place(0, example)
        if alone.problems:
            raise alone.problems[0]
        return Placed(alone.documents[0], alone.by_answer.get(0, ()))

    def _add_known(self, texts: BatchTexts, i: int, example: Conversation, alone: Alone) -> bool:
        """Add a conversation of a shape that is known; False where it must be rendered."""
        messages = example.messages
        if self._table is None or example.tools or any(len(message) != 2 for message in messages):
            return False
        layout = self._layouts.find(Shape(tuple([m["role"] for m in messages]), tuple(example.train)))
        contents = [message["content"] for message in messages]
        if layout is None or not layout.fits(contents):
            return False
        text = "".join(chain.from_iterable(zip_longest(layout.parts, contents, fillvalue="")))
        if not self._table.accepts(text) or (not text.isascii() and has_reserved(text)):
            return False
        starts = layout.part_starts([len(each) if each.isascii() else len(each.encode()) for each in contents])
        for mark in layout.marks:
            span = (starts[mark.start_part] + mark.start, starts[mark.stop_part] + mark.stop)
            texts.turn(span, mark.trained, mark.is_answer, mark.prompt)
        size = starts[-1] + layout.part_bytes[-1]
        texts.add(text, i, size, layout.specials, layout.default, (False, False))
        if layout.notes:
            alone.note(i, layout.notes)
        return True

    def _add(self, texts: BatchTexts, i: int, example: Example, alone: Alone) -> None:
        table = self._table
        if isinstance(example, Tokens):
            alone.place(i, example)
            return
        plans = self._planner.plans(example)
        if table is None or any(plan.escaped or not table.accepts(plan.text) for plan in plans.plans):
            alone.place(i, example, plans)
            return
        if plans.by_answer:
            alone.by_answer[i] = plans.left_out
        if any(plan.notes for plan in plans.plans):
            alone.note(i, (note for plan in plans.plans for note in plan.notes))
        for plan in plans.plans:
            self._add_plan(texts, i, plan)

    def _add_plan(self, texts: BatchTexts, i: int, plan: TurnPlan) -> None:
        text = plan.text
        ascii_text = text.isascii()
        for turn in plan.turns:
            span = turn.start, turn.stop
            if not ascii_text:
                first = len(text[: turn.start].encode())
                span = first, first + len(text[turn.start : turn.stop].encode())
            prompt = self._prompt(plan, turn.start) if turn.is_answer else ""
            texts.turn(span, turn.trained, turn.is_answer, prompt)
        texts.add(text, i, len(text) if ascii_text else len(text.encode()), -1, plan.default, (plan.framed, plan.ends))

    def _prompt(self, plan: TurnPlan, start: int) -> str:
        near = self._tokenizer.last_special(plan.text, max(0, start - 256), start)
        last = near or self._tokenizer.last_special(plan.text, 0, start)
        # A control token cuts the text: what follows it is encoded without regard to what precedes.
        return plan.text[0 if last is None else last[0] : start]

    def _encode_texts(
        self, texts: BatchTexts, examples: Sequence[Example], alone: Alone, total_bytes: int | None
    ) -> EncodedBatch | None:
        """Encode the collected records together; those that cannot stay are placed alone."""
        table = self._table
        if not texts.texts or table is None:
            return None
        rows = np.array(texts.rows, dtype=place.TEXT)
        flat, fast = self._flat(texts.texts, rows["size"], table, total_bytes)
        doubtful = flat.unknown | ((flat.counts(self._is_special) != rows["specials"]) & (rows["specials"] >= 0))
        turns = Turns.of(texts, flat)
        doubtful[turns.text[turns.straddles]] = True
        by_prompt = sorted((i for i, prompt in enumerate(texts.prompts) if prompt), key=texts.prompts.__getitem__)
        for prompt, which in groupby(by_prompt, texts.prompts.__getitem__):
            answers = np.fromiter(which, dtype=np.int64)
            doubtful[turns.text[answers[~turns.follow(answers, flat, self._prompt_ids(prompt))]]] = True
        again = np.unique(rows["example"][doubtful])
        if alone.by_answer:
            doubtful = np.isin(rows["example"], again)  # a conversation's documents are judged together
        flat = replace(flat, edges=np.empty(0, dtype=np.int32))  # the turns are found: no more of use
        for i in again.tolist():
            alone.place(i, examples[i])
        return self._finished(rows, flat, turns, ~doubtful, fast)

    def _flat(self, texts: list[str], sizes: Ints, table: ByteTable, total_bytes: int | None) -> tuple[Flat, bool]:
        """The texts' ids, and whether the fast encoder gave them; of how many bytes each is, `sizes` say."""
        proven = self._proven_for(int(sizes.sum()) if total_bytes is None else total_bytes, table)
        if proven is None:
            parts = self._tokenizer.encode_ids(texts)
            flat = Flat.of(np.concatenate(parts), np.array([len(part) for part in parts]), table)
            return replace(flat, unknown=np.diff(flat.edges[flat.offsets]) != sizes), False
        refuted = proven.refuted(texts)
        flat = self._together(proven, texts, sizes, table)
        unknown = flat.counts(self._is_unknown) > 0 if self._is_unknown.any() else flat.unknown
        if refuted:
            unknown = unknown | np.array([any(c in text for c in refuted) for text in texts])
        return replace(flat, unknown=unknown), proven.name == FastEncoder.name

    def _together(self, proven: ProvenEncoder, texts: list[str], sizes: Ints, table: ByteTable) -> Flat:
        if not self._separator:
            parts = [proven.encode(text) for text in texts]
            return Flat.of(np.concatenate(parts), np.array([len(part) for part in parts]), table)
        # A control token between two texts: neither sees the other, and one call takes them all.
        ids = proven.encode(self._separator.join([*texts, ""]))
        edges = place.edges_of(ids, table)
        ends = np.cumsum(sizes + len(self._separator.encode())).astype(edges.dtype)
        separators = np.searchsorted(edges, ends) - 1
        if len(edges) == 0 or edges[-1] != ends[-1] or not np.array_equal(edges[separators + 1], ends):
            raise FastEncoderMismatch("the bytes of the fast encoder's ids are not those of the text")
        del edges  # of a text of millions of tokens, each array counts
        return Flat.of(np.delete(ids, separators), np.diff(separators, prepend=-1) - 1, table)

    def _proven_for(self, size: int, table: ByteTable) -> ProvenEncoder | None:
        """The fastest encoder that is proven, for a batch of so many bytes; it is chosen for the first such batch."""
        if size < FAST_FROM_BYTES:
            return None  # whatever came before: which batches meet in a process is not to be seen in the counts
        for kind in () if self._chosen else (FastEncoder, WordEncoder):
            with suppress(Unproven):
                self._proven = ProvenEncoder(kind(self._tokenizer, table), self._tokenizer, table)
                break
        self._chosen = True
        self._placer.long = self._long
        return self._proven

    def _long(self, text: str) -> Encoded | None:
        """A long text by the fast encoder, and the characters of its tokens by the bytes that these stand for."""
        table, proven = self._table, self._proven
        if table is None or proven is None or not table.accepts(text) or any(c in text for c in proven.refuted([text])):
            return None
        ids = proven.encode(text)
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        edges = place.edges_of(ids, table)
        if int(edges[-1]) != len(data) or self._is_unknown[ids].any():
            return None
        begins = (data & 0xC0) != 0x80
        before = offsets_of(begins, np.int32)
        starts, stops = before[edges[:-1]], before[edges[1:]]
        starts -= ~begins[edges[:-1]]
        return Encoded(ids.astype(np.int64), starts, stops)

    def _prompt_ids(self, prompt: str) -> npt.NDArray[np.uint32]:
        ids = self._prompts.get(prompt)
        if ids is None:
            ids = self._tokenizer.encode_ids([prompt])[0] if self._proven is None else self._proven.encode(prompt)
            if len(self._prompts) < place.KEPT_PROMPTS and len(prompt) < place.KEPT_CHARS:
                self._prompts[prompt] = ids
        return ids

    def _finished(
        self, rows: npt.NDArray[np.void], flat: Flat, turns: Turns, keep: npt.NDArray[np.bool_], fast: bool
    ) -> EncodedBatch:
        """The documents of the texts that are kept; `rows` are TEXT[texts]."""
        trained = np.repeat(rows["default"], flat.lengths)
        sound = keep[turns.text]
        trained |= turns.cover(sound & turns.trained, len(trained))
        trained &= ~turns.cover(sound & ~turns.trained, len(trained))
        prompts = np.zeros(len(keep), dtype=np.int64)
        answered = turns.text[turns.answer]
        prompts[answered] = turns.first[turns.answer] - flat.offsets[answered]
        framed, ends = rows["frame"].T
        whole = framed & (np.bincount(answered, minlength=len(keep)) == 0)
        prompts[whole] = flat.lengths[whole] // 2
        records, count = np.ascontiguousarray(rows["example"]), int(keep.sum()) if fast else 0
        batch = EncodedBatch(flat.ids, trained, flat.offsets, prompts.astype(np.uint32), records, fast=count).only(keep)
        return self._framed(batch, framed[keep], ends[keep]) if framed.any() else batch

    def _framed(self, batch: EncodedBatch, framed: npt.NDArray[np.bool_], ends: npt.NDArray[np.bool_]) -> EncodedBatch:
        """Put the tokenizer's own tokens around texts, and the end token after those that have one."""
        prefix, suffix = self._placer.frame
        sizes, trains = [len(prefix), len(suffix)], [self._train_on == "all"] * len(prefix) + [True] * len(suffix)
        # Text by text, the beginning before the end: an end and the next text's beginning are put at one place.
        edges = np.stack([batch.offsets[:-1][framed], batch.offsets[1:][framed]], axis=1).reshape(-1)
        texts = len(edges) // 2
        put = np.repeat(np.stack([np.ones(texts, np.bool_), ends[framed]], axis=1).reshape(-1), sizes * texts)
        at = np.repeat(edges, sizes * texts)[put]
        ids = np.insert(batch.input_ids, at, np.tile(np.array([*prefix, *suffix], dtype=np.uint32), texts)[put])
        trained = np.insert(batch.trained, at, np.tile(np.array(trains, dtype=np.bool_), texts)[put])
        prompts = (batch.prompt_tokens + framed * len(prefix)).astype(np.uint32)
        offsets = offsets_of(np.diff(batch.offsets) + framed * len(prefix) + (framed & ends) * len(suffix))
        return EncodedBatch(ids, trained, offsets, prompts, batch.records, fast=batch.fast)

    def _check(self, examples: Sequence[Example], batch: EncodedBatch, checks: int) -> None:
        """Place a sample of the records alone and compare; raises FastEncoderMismatch."""
        if self._table is None:
            return  # all were placed alone
        # The same records in any process: a function of the batch alone.
        count = len(batch.records)
        spread = (count * part // checks for part in range(checks))
        for k in sorted({*spread, *range(0, count, _CHECK_EVERY)} if count else ()):
            tokens = slice(int(batch.offsets[k]), int(batch.offsets[k + 1]))
            if tokens.stop - tokens.start > _CHECK_TOKENS:
                continue  # character spans of a long text take hundreds of times its memory
            record = int(batch.records[k])
            try:
                documents = self.explain(examples[record]).documents
            except RecordProblem as problem:
                raise FastEncoderMismatch(f"row {record + 1} of the block: {problem.reason}") from problem
            first, after = np.searchsorted(batch.records, [record, record + 1]).tolist()
            if len(documents) != after - first:
                raise FastEncoderMismatch(f"row {record + 1} of the block has {len(documents)} documents alone")
            own = documents[k - first]
            pairs = (own.input_ids, batch.input_ids[tokens]), (own.trained, batch.trained[tokens])
            if not all(np.array_equal(*pair) for pair in pairs):
                raise FastEncoderMismatch(f"row {record + 1} of the block has other ids or another mask")


NO_ONE_TEXT = "no one text of the conversation has an exact mask for every trained answer, and the row is one document"
EQUAL = "chosen and rejected become the same tokens"
OTHER_PROMPT = "the template writes the prompt of chosen and that of rejected differently"
WITH_MARGIN = "pairs with a margin"
AT_ITS_TURN = "answers written as at their turn: the whole conversation has no exact mask"
_SIDES = ("chosen", "rejected")


class AnyEncoder:
    """Encodes examples of any kind."""

    def __init__(self, encoder: Encoder, kind: ExampleKind) -> None:
        """All examples are of this `kind`, which is the method's."""
        self._encoder = encoder
        self._kind = kind

    def encode(self, examples: Sequence[Learned], total_bytes: int | None = None, checks: int = CHECKS) -> EncodedBatch:
        """Encode as `Encoder.encode` does. The documents of a pair lie next to each other, or are both left out.

        Labels and margins become columns; `prompt_tokens` are then all before the first trained token.
        """
        parts = [part for example in examples for part in answers_of(example)]
        batch = self._encoder.encode(parts, total_bytes, checks)
        if self._kind == "preference":
            return _compared(batch, 2, "margin", _margins(examples))
        if self._kind == "unpaired":
            labels = [example.label for example in examples if isinstance(example, Labelled)]
            return _compared(batch, 1, "label", np.array(labels, dtype=np.bool_))
        return batch

    def explain(self, example: Learned) -> Placed:
        """Encode one example with the rule of every token. Raises RecordProblem."""
        if not isinstance(example, (Pair, Labelled)):
            return self._encoder.explain(example)
        batch = self.encode([example])
        if batch.problems:
            raise batch.problems[0]
        documents = [self._encoder.explain(part).documents[0] for part in answers_of(example)]
        prompts = [int(np.argmax(each.trained)) if each.trained.any() else len(each.trained) for each in documents]
        return Placed([replace(each, prompt_tokens=n) for each, n in zip(documents, prompts, strict=True)], ())


def _compared(batch: EncodedBatch, each: int, name: str, values: npt.NDArray[np.generic]) -> EncodedBatch:
    """The documents of answers as those of examples, of which `each` belong to one, with a column of their `values`."""
    problems: dict[int, RecordProblem] = {}
    for part, problem in sorted(batch.problems.items()):
        problems.setdefault(part // each, _placed(problem, _SIDES[part % 2] if each == 2 else None))
    several = np.flatnonzero(np.bincount(batch.records, minlength=len(values) * each) > 1).tolist()
    for part in (*several, *(part for part, left_out in batch.by_answer.items() if left_out)):
        problems.setdefault(part // each, RecordProblem(NO_ONE_TEXT, 1))
    whole = batch.only(~np.isin(batch.records // each, list(problems)))
    prompts = _prompts(whole)
    if each == 2:
        pairs = whole.records[::2] // 2
        for reason, found in _unlike(whole, prompts):
            problems |= {record: RecordProblem(reason, 1) for record in pairs[found].tolist() if record not in problems}
        keep = ~np.isin(whole.records // 2, list(problems))
        whole, prompts = whole.only(keep), prompts[keep]
    notes = Counter(batch.notes)
    if batch.by_answer:
        notes[AT_ITS_TURN] += sum(part // each not in problems for part in batch.by_answer)
    own = whole.records // each
    column = values[own]
    if name == "margin" and (known := int((~np.isnan(column[::2])).sum())):
        notes[WITH_MARGIN] += known
    return replace(
        whole, prompt_tokens=prompts.astype(np.uint32), records=own, problems=problems, by_answer={}, notes=notes,
        fast=min(batch.fast, len(own)), columns={name: column},
    )  # fmt: skip


def _placed(problem: RecordProblem, side: str | None) -> RecordProblem:
    """The problem of one answer's document, with the key of that answer for its place."""
    if side is None:
        return problem
    return RecordProblem(problem.reason, problem.col if not problem.path else None, (side,), problem.hint)


def _prompts(batch: EncodedBatch) -> Ints:
    """int64[documents]: tokens before the first trained one; all of them where none is."""
    at = np.append(np.flatnonzero(batch.trained), len(batch.trained))
    first = at[np.searchsorted(at, batch.offsets[:-1])]
    prompts: Ints = np.minimum(first, batch.offsets[1:]) - batch.offsets[:-1]
    return prompts


def _unlike(batch: EncodedBatch, prompts: Ints) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    """Reasons why pairs of neighbours are no two answers to one prompt, each with bool[pairs]."""
    lengths = np.diff(batch.offsets)
    chosen, rejected = slice(None, None, 2), slice(1, None, 2)
    learned = (prompts < lengths)[chosen] & (prompts < lengths)[rejected]  # the others are left out for another reason
    alike = prompts[chosen] == prompts[rejected]
    shared = _equal_tokens(batch, np.where(alike, prompts[chosen], 0))
    same_length = lengths[chosen] == lengths[rejected]
    equal = same_length & _equal_tokens(batch, np.where(same_length, lengths[chosen], 0))
    return [(EQUAL, equal), (OTHER_PROMPT, learned & ~(alike & shared))]


def _equal_tokens(batch: EncodedBatch, counts: Ints) -> npt.NDArray[np.bool_]:
    """bool[pairs]: whether both documents of a pair begin with the same `counts` ids."""
    starts = batch.offsets[:-1]
    one, other = (ranges(first, counts) for first in (starts[::2], starts[1::2]))
    differs = batch.input_ids[one] != batch.input_ids[other]
    owner = np.repeat(np.arange(len(counts)), counts)
    equal: npt.NDArray[np.bool_] = np.bincount(owner[differs], minlength=len(counts)) == 0
    return equal


def _margins(examples: Sequence[Learned]) -> npt.NDArray[np.float32]:
    """float32[examples]: by how much chosen answers are preferred; NaN where a pair does not say."""
    margins = (example.margin for example in examples if isinstance(example, Pair))
    return np.array([np.nan if margin is None else margin for margin in margins], dtype=np.float32)
