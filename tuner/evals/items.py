"""The items of a task, as a JSONL file or a plug-in gives them: one form for each kind, which its keys decide."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuner.data.reading.blocks import blocks, lines_in, records_of
from tuner.data.sources import SourceFile
from tuner.errors import DataError

Kind = Literal["choice", "text", "question"]
MOST_ITEMS = 1 << 18
"""Items are held in memory, some kB each."""
FORMS = '{"prompt", "choices", "answer"}, {"text"} or {"prompt", "answer"}'


@dataclass(frozen=True)
class ChoiceItem:
    """Answers to a prompt, of which one is right: the model's choice is the most likely one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    """The right one, from 0."""


@dataclass(frozen=True)
class TextItem:
    """A text whose perplexity is measured."""

    text: str


@dataclass(frozen=True)
class QuestionItem:
    """A prompt that is answered by generating, and any of the answers that are right."""

    prompt: str
    answers: tuple[str, ...]
    stop: tuple[str, ...] = ()
    """A generated answer ends before the first of these."""


Item = ChoiceItem | TextItem | QuestionItem


@dataclass(frozen=True)
class TaskItems:
    """The items of a task, all of one kind, with the records that they came from."""

    kind: Kind
    items: Sequence[Item]
    records: Sequence[Mapping[str, Any]]
    ids: Sequence[str]
    """12 hexadecimal digits each: the beginning of the SHA-256 of the record, by which two evaluations are paired."""


def read_items(path: Path, max_items: int | None = None) -> TaskItems:
    """The items of a JSONL file, which may be compressed by gzip. Raises DataError with the line that is wrong."""
    return items_of(_records(path), str(path), max_items)


def items_of(records: Iterable[Mapping[str, Any]], source: str, max_items: int | None = None) -> TaskItems:
    """The items that records are. Raises DataError for a record of no form, or of another kind than the first."""
    kind: Kind | None = None
    items: list[Item] = []
    kept: list[Mapping[str, Any]] = []
    for number, record in enumerate(records, 1):
        if max_items is not None and len(items) == max_items:
            break
        if len(items) == MOST_ITEMS:
            raise DataError(f"{source}: holds more than {MOST_ITEMS:,} items", hint="set max_items, or divide the file")
        item = item_of(record, f"{source}:{number}")
        own = kind_of(item)
        if kind is not None and own != kind:
            raise DataError(
                f"{source}:{number}: is of the kind {own}, and those before it are of the kind {kind}",
                hint="write items of another kind to a file of their own",
            )
        kind = own
        items.append(item)
        kept.append(record)
    if kind is None:
        raise DataError(f"{source}: holds no items", hint=f"write one a line: {FORMS}")
    return TaskItems(kind, items, kept, [id_of(record) for record in kept])


def kind_of(item: Item) -> Kind:
    """What is asked of an item."""
    return "choice" if isinstance(item, ChoiceItem) else "text" if isinstance(item, TextItem) else "question"


def item_of(record: object, where: str) -> Item:
    """The item that a record is. Raises DataError with its place."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: is no object", hint=f"write one a line: {FORMS}")
    if "choices" in record:
        return _choice(record, where)
    if "text" in record:
        text = _text(record, "text", where)
        if not text:
            raise DataError(f"{where}: text is empty", hint="leave the item out")
        return TextItem(text)
    if "prompt" not in record or "answer" not in record:
        keys = ", ".join(map(str, record)) or "no keys"
        raise DataError(f"{where}: has {keys}, which is no form of an item", hint=f"write {FORMS}")
    answers, stops = _texts(record, "answer", where), _texts(record, "stop", where, ())
    return QuestionItem(_text(record, "prompt", where), answers, stops)


def id_of(record: Mapping[str, Any]) -> str:
    """What a record is known by: the same for the same keys and values, in any order."""
    written = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _choice(record: Mapping[str, Any], where: str) -> ChoiceItem:
    choices, answer = _texts(record, "choices", where), record.get("answer")
    if len(choices) < 2 or "" in choices:
        raise DataError(f"{where}: choices: at least two texts that are not empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise DataError(
            f"{where}: answer: got {answer!r}; allowed: the number of the right choice, 0 to {len(choices) - 1}"
        )
    return ChoiceItem(_text(record, "prompt", where), choices, answer)


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: got {_shown(value)}; allowed: a text")
    return value


def _texts(record: Mapping[str, Any], key: str, where: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    value = record.get(key, default)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        raise DataError(f"{where}: {key}: got {_shown(value)}; allowed: a text, or a list of texts")
    if not listed and default is None:
        raise DataError(f"{where}: {key}: got an empty list")
    return tuple(listed)


def _shown(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    file = SourceFile(path, "jsonl", name=str(path), compression="gzip" if path.suffix == ".gz" else "")
    before = 0
    for block in blocks(file):
        for record in records_of(block):
            if record.problem is not None:
                raise DataError(f"{path}:{before + record.line}: {record.problem.reason}")
            yield record.value or {}
        before += lines_in(block)
