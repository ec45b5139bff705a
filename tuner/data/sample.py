"""Some of a source's records, from all over it, and what they are as documents of a model."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.config.methods import ExampleKind
from tuner.data.building.encoded import bad_record, targets_of
from tuner.data.encoding.compared import AnyEncoder
from tuner.data.encoding.encode import Encoder, FastEncoderMismatch
from tuner.data.encoding.named_templates import named_template
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.encoding.tokenizer_json import with_control_tokens, with_tokens
from tuner.data.encoding.turns import CALLS_NOT_SHOWN, NOT_SHOWN, SHORTENED, TrainOn
from tuner.data.reading.block import RawRecord
from tuner.data.reading.examples import answers_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import Compared, Conversation, Example
from tuner.data.sources import SourceFile
from tuner.errors import DataError

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
        self._kept: list[tuple[Example | Compared, RawRecord, SourceFile, int]] = []
        self._cost = 0
        self._share = 1.0
        self._drawn = random.Random(0)
        self.is_all = True
        """Whether all that were offered are here."""

    def offer(self, example: Example | Compared, record: RawRecord, file: SourceFile, before: int) -> None:
        """Maybe keep a record; `before` are the lines of the file before its block."""
        if self._share < 1 and self._drawn.random() >= self._share:
            return
        self._kept.append((example, record, file, before))
        self._cost += _cost(example, record)
        while self._cost > 2 * SAMPLE_COST and len(self._kept) > 1:
            self._halve()

    def end(self) -> None:
        """All have been offered: keep no more than are to be encoded."""
        while self._cost > SAMPLE_COST and len(self._kept) > 1:
            self._halve()

    def _halve(self) -> None:
        self._share /= 2
        self.is_all = False
        kept = [one for one in self._kept if self._drawn.random() < 0.5]
        self._kept = kept or self._kept[:1]
        self._cost = sum(_cost(example, record) for example, record, *_ in self._kept)

    @property
    def examples(self) -> list[Example | Compared]:
        """The examples, in the order of their rows."""
        return [example for example, *_ in self._kept]

    @property
    def sources(self) -> list[tuple[SourceFile, RawRecord]]:
        """The file and the record of each."""
        return [(file, record) for _, record, file, _ in self._kept]

    @property
    def repeats(self) -> bool:
        """Whether most are the same as another one."""
        return len({record.raw for _, record, *_ in self._kept}) < len(self._kept) / 2

    def place(self, number: int, problem: RecordProblem) -> str:
        """Where an example is and what is wrong with it."""
        _, record, file, before = self._kept[number]
        return described(file, before, record, problem)


def _cost(example: Example | Compared, record: RawRecord) -> int:
    messages = max(len(part.messages) if isinstance(part, Conversation) else 1 for part in answers_of(example))
    return len(record.raw) * max(1, messages // CHEAP_MESSAGES)


def described(file: SourceFile, before: int, record: RawRecord, problem: RecordProblem) -> str:
    """`rows.jsonl:3:1: messages: has no answer`, of a block with so many lines before it."""
    bad = bad_record(record, problem)
    return f"{file.name}:{before + bad.line}:{bad.col}: {f'{bad.where}: ' if bad.where else ''}{bad.reason}"


@dataclass(frozen=True)
class EncodedSample:
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


def encoded_of(
    tokenizer: TextTokenizer, examples: Sequence[Example | Compared], kind: ExampleKind
) -> EncodedSample | None:
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


@dataclass(frozen=True)
class Templated:
    """A tokenizer with the chat template that suits rows."""

    tokenizer: TextTokenizer | None
    """None where the model's is not here."""
    name: str
    """`tokenizer.chat_template`; empty for the tokenizer's own, or for none."""
    why: str
    """What the model's own leaves out; empty where it has none."""


def template_for(
    own: TextTokenizer, examples: Sequence[Example | Compared], kind: ExampleKind, chats: bool
) -> Templated:
    """The model's own template where it writes what the examples have; else the first that does."""
    if not chats:
        return Templated(own, "", "")
    lost = _lost(own, examples, kind) if own.has_template else ""
    if own.has_template and not lost:
        return Templated(own, "", "")
    named = {name: _with_template(own, name) for name in TEMPLATES}
    whole = next((name for name, tokenizer in named.items() if _lost(tokenizer, examples, kind) == ""), None)
    if whole is None:
        return Templated(own, "", "") if own.has_template else Templated(named[TEMPLATES[0]], TEMPLATES[0], "")
    return Templated(named[whole], whole, lost or "")


def _lost(tokenizer: TextTokenizer, examples: Sequence[Example | Compared], kind: ExampleKind) -> str | None:
    """What its template leaves out of the examples; None where it cannot write them."""
    encoded = encoded_of(tokenizer, examples, kind)
    return None if encoded is None else next((note for note in LOST if note in encoded.notes), "")


def _with_template(own: TextTokenizer, name: str) -> TextTokenizer:
    """The tokenizer as a recipe that names the template has it, with the tokens that it writes."""
    named = named_template(name)
    assert named is not None
    files, added = with_control_tokens(own.files, (), named.tokens)
    return TextTokenizer(with_tokens(files, added)[0] if added else files, named.source)
