"""A look at the records of a source, for `tuner init`: read and encoded by what preparation reads them with.

Sources are read whole, very large ones up to a GiB, and the rest is estimated from the sizes of their files. A sample
from all over them is encoded. From the lengths of the documents follow a row length, a batch size and a duration that
give enough steps to learn.
"""

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat, takewhile
from math import prod
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.config.methods import ExampleKind
from tuner.config.recipe import DataSource
from tuner.config.starter import FEW_STEPS, LONGEST_PRETRAIN, Look
from tuner.data.building.bins import pack
from tuner.data.building.documents import first_records
from tuner.data.building.encoded import bad_record, targets_of
from tuner.data.building.spec import inflated_bytes, positions_in
from tuner.data.encoding.encode import AnyEncoder, Encoder, FastEncoderMismatch
from tuner.data.encoding.tokenizer import TextTokenizer, parse_json, with_control_tokens, with_tokens
from tuner.data.encoding.tokenizer_files import local_directory, local_files, named_template
from tuner.data.encoding.turns import CALLS_NOT_SHOWN, NOT_SHOWN, SHORTENED, TrainOn
from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import blocks, examples_of, lines_in
from tuner.data.reading.examples import Conversation, Example, Learned, PlainText, PromptCompletion, Tokens, answers_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import ProposedReading, reading_for
from tuner.data.reading.records import form_of, unused_texts
from tuner.data.sources import SourceFile, expand
from tuner.errors import DataError
from tuner.runtime.safetensors_header import read_header

READ_BYTES = 1 << 30
"""Records are read up to so many bytes of them."""
FIRST = 64
"""How they are read is tried on so many."""
CHARACTERS_PER_TOKEN = 3
"""A cautious estimate where the model's tokenizer is not here."""
TURN_TOKENS = 5
"""What a chat template writes around a message, by the same estimate."""
SMALLEST = 256
DOUBLED_TO, STEP = 8192, 4096
"""Row lengths that are chosen are powers of two up to the first, then multiples of the second."""
CUT = 0.01
"""The share of the tokens that may lie in documents longer than a chosen row length."""
WHOLE = 0.99
"""The share of plain documents that a chosen row length keeps whole."""
FEWEST_WHOLE = 0.5
"""Where rows hold fewer of the documents than this, preparation would stop: they are cut."""
MARGIN = 1.02
"""By which lengths that were not counted are taken to be longer than they are estimated."""
PACKED = 20_000
"""Documents that are packed to know how many rows they take."""
BATCHES, USUAL_BATCH = (16, 8, 4, 2), 8
FEW_ROWS_EPOCHS = 3
"""Epochs where one alone would be too few steps of `USUAL_BATCH` rows."""
_FORMS = {"preference": "preference", "unpaired": "labelled"}
"""What records that compare answers are called, whatever the form of their prompt."""
SAMPLE_COST, CHEAP_MESSAGES = 2 << 20, 8
"""Bytes of the records that are kept and encoded, up to twice as many while they are read; those of a long chat count
more, as each of its answers may be a document."""
TEMPLATES = ("chatml", "qwen3")
"""Those that are tried, in this order, where a model has none, or one that leaves out what rows have."""
LOST = (NOT_SHOWN, CALLS_NOT_SHOWN, SHORTENED)
"""What a template may leave out that is to be learned from."""
_TRAIN_ON: dict[str, TrainOn] = {"sft": "assistant", "pretrain": "all"}


class Sample:
    """Records drawn evenly from all that are offered, whatever their number: the same ones each time."""

    def __init__(self) -> None:
        self.kept: list[tuple[Learned, RawRecord, SourceFile, int]] = []
        """Each as it was offered."""
        self._cost = 0
        self._share = 1.0
        self._drawn = random.Random(0)
        self.is_all = True
        """Whether all that were offered are here."""

    def offer(self, example: Learned, record: RawRecord, file: SourceFile, before: int) -> None:
        """Maybe keep a record; `before` are the lines of the file before its block."""
        if self._share < 1 and self._drawn.random() >= self._share:
            return
        self.kept.append((example, record, file, before))
        self._cost += _cost(example, record)
        self.cut_to(2 * SAMPLE_COST)

    def cut_to(self, most: int) -> None:
        """Keep half of them, and half of these, until they cost no more."""
        while self._cost > most and len(self.kept) > 1:
            self._share /= 2
            self.is_all = False
            self.kept = [one for one in self.kept if self._drawn.random() < 0.5] or self.kept[:1]
            self._cost = sum(_cost(example, record) for example, record, *_ in self.kept)

    @property
    def examples(self) -> list[Learned]:
        """The examples, in the order of their rows."""
        return [example for example, *_ in self.kept]

    @property
    def repeats(self) -> bool:
        """Whether most are the same as another one."""
        return len({record.raw for _, record, *_ in self.kept}) < len(self.kept) / 2

    def place(self, number: int, problem: RecordProblem) -> str:
        """Where an example is and what is wrong with it."""
        _, record, file, before = self.kept[number]
        return described(file, before, record, problem)


def _cost(example: Learned, record: RawRecord) -> int:
    messages = max(len(part.messages) if isinstance(part, Conversation) else 1 for part in answers_of(example))
    return len(record.raw) * max(1, messages // CHEAP_MESSAGES)


def described(file: SourceFile, before: int, record: RawRecord, problem: RecordProblem) -> str:
    """`rows.jsonl:3:1: messages: has no answer`, of a block with so many lines before it."""
    bad = bad_record(record, problem)
    return f"{file.name}:{before + bad.line}:{bad.col}: {f'{bad.where}: ' if bad.where else ''}{bad.reason}"


class EncodedSample(NamedTuple):
    """What examples are as documents, or pairs of them."""

    lengths: npt.NDArray[np.int64]
    """int64[documents]: tokens of each, of pairs the sum of both."""
    longest: npt.NDArray[np.int64]
    """int64[examples]: tokens of the longest document of each, 0 for those that are none."""
    nothing_learned: int
    """Documents of which no token would be trained: they are left out."""
    problems: Mapping[int, RecordProblem]
    """Why an example is no document."""
    notes: Counter[str]


def encoded_of(tokenizer: TextTokenizer, examples: Sequence[Learned], kind: ExampleKind) -> EncodedSample | None:
    """The examples as this tokenizer makes documents of them; None where it cannot."""
    each = 2 if kind == "preference" else 1
    try:
        encoder = Encoder(tokenizer, _TRAIN_ON.get(kind, "last_assistant"), "escape", fast=False)
        batch = AnyEncoder(encoder, kind).encode(examples, checks=1)
    except (DataError, FastEncoderMismatch):
        return None
    lengths = np.diff(batch.offsets[::each]).astype(np.int64)
    learned = np.all((targets_of(batch.trained, batch.offsets) > 0).reshape(-1, each), axis=1)
    longest = np.zeros(len(examples), dtype=np.int64)
    np.maximum.at(longest, batch.records[::each], lengths)
    nothing = len(learned) - int(learned.sum())
    return EncodedSample(lengths[learned], longest, nothing, batch.problems, batch.notes)


class Templated(NamedTuple):
    """A tokenizer with the chat template that suits rows."""

    tokenizer: TextTokenizer | None
    """None where the model's is not here."""
    name: str
    """`tokenizer.chat_template`; empty for the tokenizer's own, or for none."""
    why: str
    """What the model's own leaves out; empty where it has none."""


def template_for(own: TextTokenizer, examples: Sequence[Learned], kind: ExampleKind, chats: bool) -> Templated:
    """The model's own template where it writes what the examples have; else the first that does."""
    lost = _lost(own, examples, kind) if chats and own.has_template else ""
    if not chats or (own.has_template and not lost):
        return Templated(own, "", "")
    named = {name: _with_template(own, name) for name in TEMPLATES}
    whole = next((name for name, tokenizer in named.items() if _lost(tokenizer, examples, kind) == ""), None)
    if whole is None:
        return Templated(own, "", "") if own.has_template else Templated(named[TEMPLATES[0]], TEMPLATES[0], "")
    return Templated(named[whole], whole, lost or "")


def _lost(tokenizer: TextTokenizer, examples: Sequence[Learned], kind: ExampleKind) -> str | None:
    """What its template leaves out of the examples; None where it cannot write them."""
    encoded = encoded_of(tokenizer, examples, kind)
    return None if encoded is None else next((note for note in LOST if note in encoded.notes), "")


def _with_template(own: TextTokenizer, name: str) -> TextTokenizer:
    """The tokenizer as a recipe that names the template has it, with the tokens that it writes."""
    named = named_template(name)
    assert named is not None
    files, added = with_control_tokens(own.files, (), named.tokens)
    return TextTokenizer(with_tokens(files, added)[0] if added else files, named.source)


@dataclass
class _SourceRead:
    """What was read of a source."""

    sample: Sample = field(default_factory=Sample)
    estimates: "array[int]" = field(default_factory=lambda: array("q"))
    """Tokens of every example, by its characters."""
    forms: Counter[str] = field(default_factory=Counter)
    """Of the sample."""
    records: int = 0
    size: int = 0
    """Bytes of the blocks that were read."""
    is_all: bool = True
    bad: int = 0
    first_bad: str | None = None
    """The first bad one: its place and what is wrong with it."""


def look(model: str, source: DataSource, progress: Callable[[str], None] = lambda text: None) -> Look:
    """Return what the records of a source are, how many and how long, and what suits them.

    How the records are read is chosen by trying it on the first ones: `columns` where their keys are not ours. Lengths
    are counted with the model's tokenizer where its files are on this machine: of a sample, and of the others by its
    tokens for each character. Bad records are counted, of all that are read; ``progress`` is called with their number.
    Raises DataError where no record can be read, and MachineError for a hub data set that cannot be fetched.
    """
    own, positions = _of_model(model)
    files = expand([source])
    if any(file.array is not None for file in files):
        raise DataError(f"{source.path}: an array of token ids, which init does not read")
    has_template = own is not None and own.has_template
    first = list(islice((value for file in files for value in first_records(file)), FIRST))
    reading = ProposedReading("sft", source.format, source.columns)
    if source.format == "auto" and not source.columns:
        reading = reading_for(first, has_template)
        source = source.model_copy(update={"columns": reading.columns, "format": reading.format})
        files = expand([source])
    kind: ExampleKind = reading.kind
    read = _read(files, source.columns, kind, progress)
    if not read.records:
        raise DataError(f"{source.path}: no rows") if read.first_bad is None else _all_bad(read)
    examples = read.sample.examples
    parts = [part for example in examples for part in answers_of(example)]
    if kind == "sft" and all(isinstance(example, PlainText) for example in parts):
        kind = "pretrain"
    pretrain = kind == "pretrain"
    chats = any(isinstance(example, Conversation) for example in parts)
    chosen = Templated(own, "", "") if own is None else template_for(own, examples, kind, chats)
    encoded = None if chosen.tokenizer is None else encoded_of(chosen.tokenizer, examples, kind)
    share = len(examples) / read.records
    unread = {} if encoded is None else encoded.problems
    times = 1.0 if read.is_all else max(inflated_bytes(files) / max(read.size, 1), 1.0)
    lengths = _lengths(read, encoded)
    max_length = _max_length(lengths, times, pretrain, positions)
    longer = lengths > max_length
    truncates = not pretrain and bool(longer.mean() > FEWEST_WHOLE)
    rows = _packed_rows(lengths, max_length, pretrain, truncates) * times
    epochs = FEW_ROWS_EPOCHS if not pretrain and rows < FEW_STEPS * USUAL_BATCH else 1
    return Look(
        form=" and ".join(form for form, _ in read.forms.most_common()), rows=round(read.records * times),
        is_all=read.is_all, kind=kind, columns=dict(source.columns), format=source.format,
        unused=_unused(first, reading),
        bad=read.bad + round(len(unread) / share),
        first_bad=read.first_bad or next((read.sample.place(i, problem) for i, problem in unread.items()), ""),
        are_bad_counted=read.is_all and (share == 1 or not unread),
        nothing_learned=0 if encoded is None else round(encoded.nothing_learned / share),
        repeats=read.sample.repeats, template=chosen.name, why_template=chosen.why, by_tokenizer=encoded is not None,
        is_counted=encoded is not None and share == 1 and read.is_all, longest=int(lengths.max()),
        longer=round(int(longer.sum()) * times), longer_tokens=float(lengths[longer].sum() / lengths.sum()),
        truncates=truncates, max_length=max_length, packed_rows=max(round(rows), 1), epochs=epochs,
        global_batch_size=next((size for size in BATCHES if rows * epochs / size >= FEW_STEPS), 1),
        parameters=_parameters(model),
    )  # fmt: skip


def _parameters(model: str) -> int | None:
    """Numbers in a model's safetensors files, by their headers, where they are on this machine."""
    directory = local_directory(model)
    try:
        headers = [read_header(path)[0] for path in directory.glob("*.safetensors")] if directory is not None else []
        return sum(prod(facts["shape"]) for header in headers for facts in header.values()) or None
    except (DataError, KeyError, TypeError):  # which a training names
        return None


def _all_bad(read: _SourceRead) -> DataError:
    """The error where no record can be read."""
    rows = "its row is" if read.bad == 1 else f"all of its {read.bad:,} rows are"
    return DataError(str(read.first_bad), hint=f"{rows} bad, this one first: fix {'it' if read.bad == 1 else 'them'}")


def _unused(records: Sequence[Mapping[str, object]], reading: ProposedReading) -> tuple[str, ...]:
    """The keys whose text is not read of the records that are read."""
    read = (record for record in records if reading.try_on(record) is not None)
    keys = (key for record in read for key in unused_texts(record, reading.columns, reading.kind))
    return tuple(dict.fromkeys(keys)) if reading.format in {"auto", "sharegpt"} else ()


def _read(
    files: Sequence[SourceFile], columns: Mapping[str, str], kind: ExampleKind, progress: Callable[[str], None]
) -> _SourceRead:
    """Read records until there are enough; bad ones are counted."""
    read = _SourceRead()
    for file in files:
        before = 0
        for block in blocks(file):
            if read.size >= READ_BYTES:
                read.is_all = False
                break
            for record, example in examples_of(block, kind):
                if isinstance(example, RecordProblem):
                    read.bad += 1
                    read.first_bad = read.first_bad or described(file, before, record, example)
                    continue
                read.records += 1
                read.estimates.append(sum(map(_estimated, answers_of(example))))  # of pairs the sum of both
                read.sample.offer(example, record, file, before)
            read.size += block.size
            before += lines_in(block)
            progress(f"{read.records:,} rows")
    read.sample.cut_to(SAMPLE_COST)
    for _, record, file, _ in read.sample.kept:
        form = file.format if file.format != "auto" else form_of(record.value or {}, columns)
        read.forms[_FORMS.get(kind, form or "text")] += 1
    return read


def _of_model(model: str) -> tuple[TextTokenizer | None, int | None]:
    """The tokenizer of a model whose files are on this machine, and its longest position; None for what is not."""
    files = local_files(model)
    try:
        positions = positions_in(parse_json(files, "config.json"))
        tokenizer = TextTokenizer(files, origin=model) if "tokenizer.json" in files else None
    except DataError:
        return None, None
    return tokenizer, positions


def _lengths(read: _SourceRead, encoded: EncodedSample | None) -> npt.NDArray[np.int64]:
    """int64[documents]: tokens of each document, or pair of them; those of a sample stand for the others' by theirs."""
    estimates = np.frombuffer(read.estimates, dtype=np.int64)
    if encoded is None or not len(encoded.lengths):
        return estimates
    if read.sample.is_all:
        return encoded.lengths
    there = encoded.longest > 0  # of a chat of several documents the longest
    sampled = np.array([sum(map(_estimated, answers_of(example))) for example in read.sample.examples])[there]
    each, always = float(encoded.longest.sum() / sampled.sum()), 0.0
    if len(set(sampled.tolist())) > 1:  # a template writes as much around a short document as around a long one
        each, always = map(float, np.polyfit(sampled, encoded.longest[there], 1))
    tokens: npt.NDArray[np.float64] = np.maximum(estimates * each + always, 1) * MARGIN
    return np.ceil(tokens).astype(np.int64)


def _estimated(example: Example) -> int:
    if isinstance(example, Tokens):
        return len(example.input_ids)
    if isinstance(example, Conversation):
        texts = [str(turn.get(key) or "") for turn in example.messages for key in ("content", "reasoning_content")]
        turns = len(example.messages)
    else:
        texts = [example.prompt, example.completion] if isinstance(example, PromptCompletion) else [example.text]
        turns = 0
    return max(1, sum(map(len, texts)) // CHARACTERS_PER_TOKEN + TURN_TOKENS * turns)


def _max_length(lengths: npt.NDArray[np.int64], times: float, pretrain: bool, positions: int | None) -> int:
    """The shortest row with which few tokens are cut; for plain text the longest that still gives enough steps.

    Where the model's positions cut more, the shortest that cuts no more than these; all of them where most documents
    are cut. Plain documents stay whole where there is too little for enough steps: cut short, they would teach less.
    """
    if pretrain:
        choices = _row_lengths(min(LONGEST_PRETRAIN, positions or LONGEST_PRETRAIN))
        whole = [length for length in choices if np.mean(lengths <= length) >= WHOLE]
        for batch in (USUAL_BATCH, 1):  # a step of one row is better than a document in pieces
            enough = [length for length in choices if lengths.sum() * times / length >= FEW_STEPS * batch]
            if enough:
                break
        return max([*enough, *whole[:1]], default=choices[0])
    choices = _row_lengths(positions or max(DOUBLED_TO, int(lengths.max()) + STEP))
    if np.mean(lengths > choices[-1]) > FEWEST_WHOLE:
        return choices[-1]
    allowed = max(CUT * lengths.sum(), lengths[lengths > choices[-1]].sum())
    return next(length for length in choices if lengths[lengths > length].sum() <= allowed)


def _row_lengths(most: int) -> list[int]:
    """The row lengths that are chosen from, up to the most positions there are."""
    doubled = accumulate(repeat(2), mul, initial=SMALLEST)
    return [*takewhile(lambda length: length < min(most, DOUBLED_TO), doubled), *range(DOUBLED_TO, most, STEP), most]


def _packed_rows(lengths: npt.NDArray[np.int64], max_length: int, pretrain: bool, truncates: bool) -> float:
    if pretrain:
        return float(-(-int(lengths.sum()) // max_length))
    fitting = np.minimum(lengths, max_length) if truncates else lengths[lengths <= max_length]
    some = fitting[:: -(-len(fitting) // PACKED)]
    return (len(pack(some, max_length)[1]) - 1) * float(fitting.sum() / some.sum())
