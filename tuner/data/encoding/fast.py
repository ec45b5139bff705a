"""Encoders that are faster than the tokenizer, used because they are shown to give the tokenizer's own ids.

They are shown to at three times: on adversarial strings and a share of the vocabulary before the first use; on every
character above ASCII when it is first seen in the data, since libraries follow different versions of Unicode; and on
a sample of the user's records, by the encoder of examples. What they cannot be trusted with goes to the tokenizer.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import regex  # type: ignore[import-untyped]

from tuner.data.encoding.tokenizer import ByteTable, TextTokenizer, Unproven
from tuner.data.ranges import ranges
from tuner.runtime.memory import allocated_bytes, give_back, resident_bytes

_CACHE_BYTES = 32 << 20
"""Growth after which the encoder, which remembers every word that it met, is rebuilt: twice what prose needs."""
_LOOK_BYTES = 8 << 20
"""Growth of the process, which is cheap to read, after which the other is looked at again."""
_CACHE_TEXT = 32 << 20
"""The same in characters of text, where growth cannot be read."""
_MEASURED_CHARS = 1 << 16
"""Growth in a call with a shorter text is not measured."""
_ALPHABET = [*"aS1 \n\r\t!_", "'s", "'LL", "\u00a0", "\u00e9", "\u4e2d", "\u3000", "\U0001f600"]
_MAX_WORDS = 1 << 18
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NOT_INSTALLED = "gigatoken is not installed: pip install gigatoken==0.10.0"


def is_installed() -> bool:
    """Whether the package is there, which is an extra of this one."""
    return find_spec("gigatoken") is not None


class FastEncoder:
    """Encodes texts with gigatoken, its memory bounded.

    Ids from the table's size on stand for bytes the tokenizer does not know.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: TextTokenizer, table: ByteTable) -> None:
        """Build it; raises Unproven where it is not installed or cannot read the tokenizer."""
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError as error:
            raise Unproven(f"{NOT_INSTALLED} ({error})") from error
        self._load: Any = load_hf_json
        self._backend: Any = None
        self._text = self._before = self._resident = 0
        self._json = table.complete_json(tokenizer.files["tokenizer.json"])
        self._rebuild()

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of a text."""
        ids: npt.NDArray[np.uint32] = self._backend.encode(text)
        if len(text) >= _MEASURED_CHARS and self._is_full(len(text)):
            self._rebuild()  # now, and not before the next text: what follows with these ids takes memory, too
        return ids

    def _is_full(self, size: int) -> bool:
        """Whether much more is held than when the encoder was new: its memory cannot be asked for alone."""
        self._text += size
        resident = resident_bytes()
        if resident is None:
            return self._text > _CACHE_TEXT
        if resident - self._resident <= _LOOK_BYTES:
            return False
        self._resident = resident
        return (allocated_bytes() or resident) - self._before > _CACHE_BYTES

    def _rebuild(self) -> None:
        self._backend = None
        try:
            self._backend = self._load(self._json)
        except Exception as error:  # gigatoken raises several kinds, also bare ones
            raise Unproven(f"gigatoken cannot read the tokenizer: {str(error).splitlines()[0]}") from error
        give_back()
        self._text, self._resident = 0, resident_bytes() or 0
        self._before = allocated_bytes() or self._resident


class ProvenEncoder:
    """An encoder that gave the right ids when it was asked, and which texts it may be given."""

    def __init__(self, encoder: "FastEncoder | WordEncoder", tokenizer: TextTokenizer, table: ByteTable) -> None:
        """Prove it; raises Unproven with the first text for which it errs."""
        self.name = encoder.name
        self.encode = encoder.encode
        self._tokenizer = tokenizer
        self._table = table
        self._known = np.zeros(0x110000, dtype=np.bool_)
        self._known[:0x80] = True
        self._refuted: set[str] = set()
        self._prove([*("".join(p) for p in product(_ALPHABET, repeat=3)), *table.words()])

    def refuted(self, texts: Sequence[str]) -> set[str]:
        """Return the characters of `texts` that the two encoders treat differently; each is looked at once."""
        codes = np.frombuffer("".join(t for t in texts if not t.isascii()).encode("utf-32-le"), dtype=np.uint32)
        if len(codes) == 0:
            return set()
        new = np.unique(codes[~self._known[codes]])
        if len(new):
            self._look_at([chr(code) for code in new])
        return self._refuted

    def _prove(self, texts: list[str]) -> None:
        texts = [text for text in texts if self._table.accepts(text)]
        self.encode("\n".join(texts))  # words that are remembered are looked up in one call, not in thousands
        owns, all_given = self._tokenizer.encode_ids(texts), [self.encode(text) for text in texts]
        ids = np.concatenate([np.empty(0, dtype=np.uint32), *all_given])
        if [len(own) for own in owns] == [len(given) for given in all_given] and np.array_equal(
            ids, np.concatenate([ids[:0], *owns])
        ):
            return  # all at once, since comparing thousands one by one takes longer than encoding them
        for text, own, given in zip(texts, owns, all_given, strict=True):
            if not np.array_equal(given[given < self._table.size], own):
                raise Unproven(f"{self.name} gives other ids for {text!r}")

    def _look_at(self, characters: list[str]) -> None:
        # Each as a letter, a mark or a space would show: after and before letters, digits, blanks, quotes and itself.
        texts = [f"a{c}a {c}1{c} \n{c}'s {c}{c}!{c}\n {c}" for c in characters]
        self.encode("\n".join(texts))
        for c, text, own in zip(characters, texts, self._tokenizer.encode_ids(texts), strict=True):
            self._known[ord(c)] = True
            # What the tokenizer would normalise in this company is proven where it stands alone.
            if not self._table.accepts(text):
                text = f"\n{c}\n"  # noqa: PLW2901 (in its place)
                [own] = self._tokenizer.encode_ids([text])  # noqa: PLW2901
            ids = self.encode(text)
            if not np.array_equal(ids[ids < self._table.size], own):
                self._refuted.add(c)


class WordEncoder:
    """Encodes texts with the tokenizer itself, its words remembered: where there is no faster encoder.

    Byte-level tokenizers cut a text into words by a regular expression, and encode each word by itself. Data repeats
    words, so each is encoded by the tokenizer once, and a text becomes a row of look-ups. Ids from the table's size on
    stand for bytes the tokenizer does not know.
    """

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
        ids: npt.NDArray[np.uint32] = self._ids[ranges(self._start[index], self._length[index])]
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
