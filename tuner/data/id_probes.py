"""Texts with the ids that training sees of them: every reader of an export must get the same ones.

A prepared directory holds some of the records as such texts; a run adds adversarial ones, and its exports are checked
with all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jsonlines

from tuner.data.encoding.adversarial import adversarial_texts
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading.blocks import blocks, records_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.records import Conversation, Example, PlainText, PromptCompletion, parse_record
from tuner.data.reading.sources import SourceFile
from tuner.errors import DataError

ID_PROBES = "id_probes.jsonl"
MAX_RECORDS = 16
MAX_CHARS = 4000
"""A longer text is left out."""


@dataclass(frozen=True)
class IdProbe:
    """A text, its ids without and with the tokens that the tokenizer puts around a text, and what it was rendered from.

    `messages` and `tools` are None where no template wrote the text.
    """

    text: str
    ids: list[int]
    framed_ids: list[int]
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def record_probes(files: Iterable[SourceFile], tokenizer: TextTokenizer) -> Iterator[IdProbe]:
    """Yield up to `MAX_RECORDS` probes: of the first records of every file that can be used."""
    every = list(files)[:MAX_RECORDS]
    for file in every:
        found = (probe for example in _examples(file) for probe in _of_example(example, tokenizer))
        yield from islice(found, MAX_RECORDS // len(every))


def text_probes(tokenizer: TextTokenizer) -> Iterator[IdProbe]:
    """Yield a probe of each adversarial text."""
    for text in adversarial_texts(tokenizer):
        yield _probe(text, tokenizer)


def write_probes(path: Path, probes: Iterable[IdProbe]) -> None:
    """Write probes, one on each line."""
    with jsonlines.open(path, "w") as writer:
        writer.write_all({name: value for name, value in vars(probe).items() if value is not None} for probe in probes)


def read_probes(path: Path) -> list[IdProbe]:
    """Read what `write_probes` wrote. Raises DataError."""
    try:
        with jsonlines.open(path) as reader:
            return [IdProbe(**line) for line in reader]
    except (OSError, TypeError, jsonlines.Error) as error:
        raise DataError(f"{path}: no probes of ids: {error}") from error


def _examples(file: SourceFile) -> Iterator[Example]:
    for block in blocks(file):
        for record in records_of(block):
            if record.value is not None:
                try:
                    yield parse_record(record.value, file.format, dict(file.columns))
                except RecordProblem:
                    continue  # preparation says what is wrong with it


def _of_example(example: Example, tokenizer: TextTokenizer) -> Iterator[IdProbe]:
    if isinstance(example, Conversation):
        messages = [dict(message) for message in example.messages]
        try:
            text = tokenizer.render(messages, tools=example.tools)
        except DataError:
            return
        yield from _short(_probe(text, tokenizer, messages, example.tools))
    elif isinstance(example, PromptCompletion):
        yield from _short(_probe(example.prompt, tokenizer))
    elif isinstance(example, PlainText):
        yield from _short(_probe(example.text, tokenizer))


def _short(probe: IdProbe) -> list[IdProbe]:
    return [probe] if len(probe.text) <= MAX_CHARS else []


def _probe(
    text: str,
    tokenizer: TextTokenizer,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> IdProbe:
    return IdProbe(text, tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=True), messages, tools)
