"""Texts with the ids that training sees of them: every reader of an export must get the same ones.

A prepared directory holds some of the records as such texts; a run adds adversarial ones, and its exports are checked
with all of them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines

from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.errors import DataError

ID_PROBES = "id_probes.jsonl"
_TOKENS = 32


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


def text_probes(tokenizer: TextTokenizer) -> Iterator[IdProbe]:
    """Yield a probe of each adversarial text."""
    return (id_probe(text, tokenizer) for text in adversarial_texts(tokenizer))


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


def id_probe(
    text: str, tokenizer: TextTokenizer, messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> IdProbe:
    """The probe of a text, which the template wrote of `messages` where these are given."""
    return IdProbe(text, tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=True), messages, tools)


def adversarial_texts(tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield some hundreds of texts: plain ones, and its special tokens and a share of its added ones amid others."""
    texts = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    yield from texts["plain"]
    named = list(dict.fromkeys(tokenizer.special_tokens.values()))
    others = [token for token in tokenizer.added_tokens_from(0) if token not in named]
    for token in [*named, *others[:: 1 + len(others) // _TOKENS]]:
        yield from (around.format(token) for around in texts["around"])
