"""Texts with the ids that training sees of them: every reader of an export must get the same ones.

A prepared directory holds some of the records as such texts; a run adds adversarial ones, and its exports are checked
with all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonlines

from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.errors import DataError

ID_PROBES = "id_probes.jsonl"
_PLAIN = (
    *("", " ", "  ", "a", " a", "a ", "  a  b  ", "\n", "\n\na\n", "a\n b", "\t", "\r\n", " \n ", "0", "12345 3.14"),
    *("Hello, world!", "don't we'll", "x = {'a': [1, 2]}\n\treturn", "a\u00a0b", "\u3000x", "\ufeffx", "\u200bx"),
    *("\u00e9t\u00e9", "cafe\u0301 A\u030a", "\ufb01 \u0130 \u1e9b\u0323", "\u4e2d\u6587 \u5b57\u3002"),
    "\u05e9 \u0645",
    *("\U0001f642\u200d\U0001f468", "\U0001f1f3\U0001f1f4 x", "\u2581", "\u2581x a\u2581b", "\u0120x", "<0x0A>", "</s"),
    *("[INST] hi [/INST]", " [INST] <<SYS>>\nx\n<</SYS>>\n\n", "<|user|>\nhi", "USER: hi ASSISTANT:", "### Human:"),
)
_AROUND = (
    *("{}", "{}a", "{} a", " {}", "a{}", "a {} b", "{0}{0}", "{0} {0}", "{0}\n{0}  x", "\n{}\n", "a\n{}\n\nb"),
    *("{}[INST] a [/INST]", "{}\nuser\n", "  {}  \u4e2d"),
)
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
    for text in adversarial_texts(tokenizer):
        yield id_probe(text, tokenizer)


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
    text: str,
    tokenizer: TextTokenizer,
    messages: list[dict[str, Any]] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> IdProbe:
    """The probe of a text, which the template wrote of `messages` where these are given."""
    return IdProbe(text, tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=True), messages, tools)


def adversarial_texts(tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield some hundreds of texts: plain ones, and its special tokens and a share of its added ones amid others."""
    yield from _PLAIN
    named = list(dict.fromkeys(tokenizer.special_tokens.values()))
    others = [token for token in tokenizer.added_tokens_from(0) if token not in named]
    for token in [*named, *others[:: 1 + len(others) // _TOKENS]]:
        yield from (around.format(token) for around in _AROUND)
