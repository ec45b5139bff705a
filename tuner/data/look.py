"""A look at the first records of a source, for `tuner init`: read and encoded by what preparation reads them with.

Small sources are read whole, larger ones up to some MiB, and the rest is estimated from the sizes of their files. From
the lengths of the first documents follow a row length, a batch size and a duration that give enough steps to learn.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat, takewhile
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tuner.config.starter import FEW_STEPS, Look
from tuner.data.building.bins import pack
from tuner.data.building.documents import first_records
from tuner.data.building.encoded import BadRecord, bad_record
from tuner.data.building.spec import inflated_bytes, positions_in
from tuner.data.encoding.compared import AnyEncoder, answers_of
from tuner.data.encoding.encode import Encoder, FastEncoderMismatch
from tuner.data.encoding.named_templates import template_source
from tuner.data.encoding.tokenizer import TextTokenizer, parse_json
from tuner.data.encoding.tokenizer_files import local_directory, local_files
from tuner.data.reading.blocks import blocks, examples_of, lines_in
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import Reading, reading_for
from tuner.data.reading.records import (
    Compared,
    Conversation,
    Example,
    PlainText,
    PromptCompletion,
    Tokens,
    form_of,
    unused_texts,
)
from tuner.data.sources import SourceFile, expand
from tuner.errors import DataError
from tuner.runtime.safetensors_header import read_header

if TYPE_CHECKING:
    from tuner.config.methods import ExampleKind
    from tuner.config.recipe import DataSource
    from tuner.data.encoding.turns import TrainOn

READ_BYTES = 16 << 20
"""Records are read up to so many bytes of them."""
FIRST = 64
"""How they are read is tried on so many."""
SAMPLE_BYTES, SAMPLE_RECORDS = 1 << 20, 4000
"""The first of them are encoded, up to either bound."""
CHARACTERS_PER_TOKEN = 3
"""A cautious estimate where the model's tokenizer is not here."""
TURN_TOKENS = 5
"""What a chat template writes around a message, by the same estimate."""
SMALLEST, LARGEST, LARGEST_PRETRAIN = 256, 8192, 2048
"""Row lengths that are chosen are powers of two between these, and the model's positions."""
WHOLE = 0.99
"""The share of the documents that a chosen row length keeps whole."""
LARGEST_BATCH, USUAL_BATCH = 16, 8
FEW_ROWS_EPOCHS = 3
"""Epochs where one alone would be too few steps of `USUAL_BATCH` rows."""


_FORMS = {"preference": "preference", "unpaired": "labelled"}
"""What records that compare answers are called, whatever the form of their prompt."""
_TRAIN_ON: dict[str, "TrainOn"] = {"sft": "assistant", "pretrain": "all"}


@dataclass
class _Read:
    """What was read of a source."""

    examples: list[Example | Compared] = field(default_factory=list)
    """The first ones."""
    forms: Counter[str] = field(default_factory=Counter)
    """Of these."""
    sampled: int = 0
    """Bytes of these."""
    records: int = 0
    size: int = 0
    """Bytes of the blocks that were read."""
    is_all: bool = True
    bad: int = 0
    first_bad: str | None = None
    """The first bad one: its place and what is wrong with it."""


def look(model: str, source: "DataSource") -> Look:
    """Return what the records of a source are, how many and how long, and what suits them.

    How the records are read is chosen by trying it on the first ones: `columns` where their keys are not ours. Lengths
    are counted with the model's tokenizer where its files are on this machine. Bad records are counted. Raises
    DataError where no record can be read, and MachineError for a hub data set that cannot be fetched.
    """
    own, positions = _of_model(model)
    files = expand([source])
    has_template = own is not None and own.has_template
    first = list(islice((value for file in files for value in first_records(file)), FIRST))
    reading = Reading("sft", source.format, source.columns)
    if source.format == "auto" and not source.columns:
        reading = reading_for(first, has_template)
        source = source.model_copy(update={"columns": reading.columns, "format": reading.format})
        files = expand([source])
    kind: ExampleKind = reading.kind
    read = _read(files, source.columns, kind)
    if not read.examples:
        raise DataError(f"{source.path}: no rows") if read.first_bad is None else _all_bad(read)
    parts = [part for example in read.examples for part in answers_of(example)]
    if kind == "sft" and all(isinstance(example, PlainText) for example in parts):
        kind = "pretrain"
    pretrain = kind == "pretrain"
    chats = any(isinstance(example, Conversation) for example in parts)
    lacks_template = chats and own is not None and not own.has_template
    counted = own if own is None or not lacks_template else TextTokenizer(own.files, template_source("chatml"))
    lengths = _encoded_lengths(read.examples, counted, kind)
    times = 1.0 if read.is_all else max(inflated_bytes(files) / max(read.size, 1), 1.0)
    estimated = lengths if lengths is not None else _estimated_lengths(read.examples)  # of pairs the sum of both
    max_length = _max_length(estimated, times * read.records / len(read.examples), pretrain, positions)
    rows = _packed_rows(estimated, max_length, pretrain) * times * read.records / len(read.examples)
    epochs = FEW_ROWS_EPOCHS if not pretrain and rows < FEW_STEPS * USUAL_BATCH else 1
    return Look(
        form=" and ".join(form for form, _ in read.forms.most_common()),
        rows=round(read.records * times),
        is_all=read.is_all,
        kind=kind,
        columns=dict(source.columns),
        format=source.format,
        unused=_unused(first, reading),
        bad=read.bad,
        first_bad=read.first_bad or "",
        lacks_template=lacks_template,
        by_tokenizer=lengths is not None,
        longest=int(estimated.max()),
        whole=float(np.mean(estimated <= max_length)),
        max_length=max_length,
        packed_rows=max(round(rows), 1),
        epochs=epochs,
        global_batch_size=_batch_size(rows * epochs),
        parameters=_parameters(model),
    )


def _parameters(model: str) -> int | None:
    """Numbers in a model's safetensors files, by their headers, where they are on this machine."""
    directory = local_directory(model)
    try:
        headers = [read_header(path)[0] for path in directory.glob("*.safetensors")] if directory is not None else []
        return sum(prod(facts["shape"]) for header in headers for facts in header.values()) or None
    except (DataError, KeyError, TypeError):  # which a training names
        return None


def _all_bad(read: _Read) -> DataError:
    """The error where no record can be read."""
    rows = "its row is" if read.bad == 1 else f"all of its {read.bad:,} rows are"
    return DataError(str(read.first_bad), hint=f"{rows} bad, this one first: fix {'it' if read.bad == 1 else 'them'}")


def _unused(records: Sequence[Mapping[str, object]], reading: Reading) -> tuple[str, ...]:
    """The keys whose text is not read of the records that are read."""
    read = (record for record in records if reading.try_on(record) is not None)
    keys = (key for record in read for key in unused_texts(record, reading.columns, reading.kind))
    return tuple(dict.fromkeys(keys)) if reading.format in {"auto", "sharegpt"} else ()


def _read(files: Sequence[SourceFile], columns: Mapping[str, str], kind: "ExampleKind") -> _Read:
    """Read records until there are enough; bad ones are counted."""
    read = _Read()
    for file in files:
        before = 0
        for block in blocks(file):
            if read.size >= READ_BYTES:
                read.is_all = False
                return read
            for record, example in examples_of(block, kind):
                if isinstance(example, RecordProblem):
                    read.bad += 1
                    read.first_bad = read.first_bad or _described(file, before, bad_record(record, example))
                    continue
                read.records += 1
                if read.sampled < SAMPLE_BYTES and len(read.examples) < SAMPLE_RECORDS:
                    read.examples.append(example)
                    read.sampled += len(record.raw)
                    form = file.format if file.format != "auto" else form_of(record.value or {}, columns)
                    read.forms[_FORMS.get(kind, form or "text")] += 1
            read.size += block.size
            before += lines_in(block)
    return read


def _described(file: SourceFile, before: int, bad: BadRecord) -> str:
    return f"{file.name}:{before + bad.line}:{bad.col}: {f'{bad.where}: ' if bad.where else ''}{bad.reason}"


def _of_model(model: str) -> tuple[TextTokenizer | None, int | None]:
    """The tokenizer of a model whose files are on this machine, and its longest position; None for what is not."""
    files = local_files(model)
    try:
        positions = positions_in(parse_json(files, "config.json"))
        tokenizer = TextTokenizer(files, origin=model) if "tokenizer.json" in files else None
    except DataError:
        return None, None
    return tokenizer, positions


def _encoded_lengths(
    examples: Sequence[Example | Compared], tokenizer: TextTokenizer | None, kind: "ExampleKind"
) -> npt.NDArray[np.int64] | None:
    """int64[documents]: tokens of each document or pair of them, by the tokenizer; None where it encodes none."""
    if tokenizer is None:
        return None
    try:
        encoder = Encoder(tokenizer, _TRAIN_ON.get(kind, "last_assistant"), "escape", fast=False)
        offsets = AnyEncoder(encoder, kind).encode(examples, checks=1).offsets
        lengths = np.diff(offsets[::2] if kind == "preference" else offsets)
    except (DataError, FastEncoderMismatch):
        return None
    return lengths.astype(np.int64) if len(lengths) else None


def _estimated_lengths(examples: Sequence[Example | Compared]) -> npt.NDArray[np.int64]:
    """int64[examples]: tokens of each by its characters."""
    return np.array([sum(map(_estimated, answers_of(example))) for example in examples], dtype=np.int64)


def _estimated(example: Example) -> int:
    if isinstance(example, Tokens):
        return len(example.input_ids)
    if isinstance(example, Conversation):
        texts = [
            str(message.get(key) or "") for message in example.messages for key in ("content", "reasoning_content")
        ]
        turns = len(example.messages)
    else:
        texts = [example.prompt, example.completion] if isinstance(example, PromptCompletion) else [example.text]
        turns = 0
    return max(1, sum(map(len, texts)) // CHARACTERS_PER_TOKEN + TURN_TOKENS * turns)


def _max_length(lengths: npt.NDArray[np.int64], times: float, pretrain: bool, positions: int | None) -> int:
    """The shortest row that keeps the documents whole; for plain text the longest that still gives enough steps.

    Where plain text is too little for that, documents stay whole all the same: cut short, they would teach less.
    """
    most = min(LARGEST_PRETRAIN if pretrain else LARGEST, positions or LARGEST)
    doubled = accumulate(repeat(2), lambda length, two: length * two, initial=SMALLEST)
    choices = [*takewhile(lambda length: length < most, doubled), most]
    whole = [length for length in choices if np.mean(lengths <= length) >= WHOLE]
    if pretrain:
        tokens = float(lengths.sum()) * times
        enough = [length for length in choices if tokens / length >= FEW_STEPS * USUAL_BATCH]
        return max([*enough, *whole[:1]], default=choices[0])
    return next(iter(whole), most)


def _packed_rows(lengths: npt.NDArray[np.int64], max_length: int, pretrain: bool) -> int:
    if pretrain:
        return -(-int(lengths.sum()) // max_length)
    fitting = lengths[lengths <= max_length]
    return len(pack(fitting, max_length)[1]) - 1


def _batch_size(rows: float) -> int:
    """The largest power of two, at most 16, with which so many rows are enough steps."""
    size = LARGEST_BATCH
    while size > 1 and rows / size < FEW_STEPS:
        size //= 2
    return size
