"""The tokenizer itself, its words remembered: where there is no faster encoder.

Byte-level tokenizers cut a text into words by a regular expression, and encode each word by itself. Data repeats
words, so each is encoded by the tokenizer once, and a text becomes a row of look-ups.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]

from tuner.data.encoding.byte_level import ByteTable, Unproven
from tuner.data.encoding.tokenizer import TextTokenizer

_MAX_WORDS = 1 << 18
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class WordEncoder:
    """Encodes texts to ids; ids from the table's size on stand for bytes the tokenizer does not know."""

    name = "remembered words"

    def __init__(self, tokenizer: TextTokenizer, table: ByteTable) -> None:
        """Raises Unproven where the tokenizer does not cut words by regular expressions alone."""
        self._tokenizer = tokenizer
        self._table = table
        self._cuts = [regex.compile(pattern) for pattern in _patterns(table.pre_tokenizer)]
        if any(cut.groups for cut in self._cuts):
            raise Unproven("its words are cut by an expression with groups")
        names = sorted(table.added, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None
        self._forget()

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of a text."""
        words: list[str] = []
        for k, part in enumerate(self._added.split(text) if self._added else [text]):
            words += [part] if k % 2 else self._cut(part)
        found = list(map(self._index.get, words))
        if None in found:
            needed = set(words)
            self._learn([word for word in needed if word not in self._index], needed)
            found = list(map(self._index.__getitem__, words))
        index = np.array(found, dtype=np.int64)
        lengths = self._length[index]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        at = np.arange(total) + np.repeat(self._start[index] - (ends - lengths), lengths)
        ids: npt.NDArray[np.uint32] = self._ids[at]
        return ids

    def _cut(self, text: str) -> list[str]:
        words = [text] if text else []
        for cut in self._cuts:
            words = [word for piece in words for word in _found(cut, piece)]
        return words

    def _forget(self) -> None:
        self._index: dict[str, int] = {name: k for k, name in enumerate(self._table.added)}
        self._ids = np.array(list(self._table.added.values()), dtype=np.uint32)
        self._length = np.ones(len(self._ids), dtype=np.int64)
        self._start = np.arange(len(self._ids), dtype=np.int64)

    def _learn(self, new: list[str], needed: set[str]) -> None:
        if len(self._index) + len(new) > _MAX_WORDS:
            self._forget()
            new = [word for word in needed if word not in self._index]
        first = len(self._ids)
        parts = [self._ids]
        for word, ids in zip(new, self._tokenizer.encode_ids(new), strict=True):
            size = len(word.encode())
            whole = int(self._table.lengths[ids].sum()) == size
            parts.append(ids if whole else np.full(size, self._table.size, dtype=np.uint32))
        lengths = np.array([len(part) for part in parts[1:]], dtype=np.int64)
        self._index.update(zip(new, range(len(self._index), len(self._index) + len(new)), strict=True))
        self._ids = np.concatenate(parts)
        self._start = np.concatenate([self._start, first + np.cumsum(lengths) - lengths])
        self._length = np.concatenate([self._length, lengths])


def _found(cut: "regex.Pattern[str]", piece: str) -> list[str]:
    """The matches in a piece, and what lies between them."""
    found: list[str] = cut.findall(piece)
    if sum(map(len, found)) == len(piece):
        return found
    edges = [0, *(edge for match in cut.finditer(piece) for edge in match.span()), len(piece)]
    return [piece[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]


def _patterns(pre_tokenizer: dict[str, Any]) -> list[str]:
    """The regular expressions by which a text is cut, one after another."""
    patterns = []
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        kind = step["type"]
        if kind == "ByteLevel":
            patterns += [_GPT2] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}|[^\p{N}]+")
        elif kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        else:
            raise Unproven(f"its words are cut by {kind}")
    return patterns
