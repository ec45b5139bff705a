"""The fast encoder: gigatoken, used where it is shown to give the tokenizer's own ids.

It is shown at three times: on adversarial strings and a share of the vocabulary before the first use; on every
character above ASCII when it is first seen in the data, since libraries follow different versions of Unicode; and on
a sample of the user's rows, by the encoder. What it cannot be trusted with goes to the tokenizer itself.
"""

import sys
import unicodedata
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tuner.data.byte_tokenizer import byte_symbols
from tuner.data.tokenizer import TextTokenizer

_STATM = Path("/proc/self/statm")
_CACHE_BYTES = 64 << 20
"""Growth of the process in its calls after which the encoder, which remembers every word it met, is built anew."""
_CACHE_TEXT = 64 << 20
"""The same in characters of text, where growth cannot be read."""
_MEASURED_CHARS = 1 << 16
"""Growth in a call with a shorter text is not measured."""
_ALPHABET = (
    "a",
    "S",
    "1",
    " ",
    "\n",
    "\r",
    "\t",
    "!",
    "'s",
    "'LL",
    "\u00a0",
    "\u00e9",
    "\u4e2d",
    "\u3000",
    "\U0001f600",
    "_",
)
_VOCABULARY_STEP = 61


class Unproven(Exception):
    """Why the fast encoder is not used for a tokenizer."""


class ByteTable:
    """The bytes that each token stands for, for byte-level tokenizers that keep every byte of a text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Raises Unproven where the tokenizer is of another kind."""
        spec = orjson.loads(tokenizer.files["tokenizer.json"])
        _require_byte_level(spec)
        self.normal_form = (spec["normalizer"] or {}).get("type")
        added = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        vocabulary: dict[str, int] = {k: v for k, v in spec["model"]["vocab"].items() if k not in added}
        size = 1 + max(*vocabulary.values(), *added.values())
        missing = [symbol for symbol in byte_symbols() if symbol not in vocabulary]
        self.size = size
        """Ids from here on stand for bytes that the tokenizer does not know and leaves out."""
        self.lengths = np.zeros(size + len(missing), dtype=np.int64)
        self.lengths[size:] = 1
        self.lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]
        for token, i in added.items():
            self.lengths[i] = len(token.encode())
        self._missing = {symbol: size + k for k, symbol in enumerate(missing)}
        self._words = list(vocabulary)[::_VOCABULARY_STEP]

    def accepts(self, text: str) -> bool:
        """Whether the tokenizer would leave the characters of `text` as they are."""
        return self.normal_form is None or text.isascii() or unicodedata.is_normalized("NFC", text)

    def complete_json(self, original: bytes) -> bytes:
        """Return the tokenizer.json with an id for every byte."""
        if not self._missing:
            return original
        spec = orjson.loads(original)  # read again: kept, it would be a hundred megabytes of objects
        spec["model"]["vocab"].update(self._missing)
        return orjson.dumps(spec)

    def words(self) -> list[str]:
        """A share of the vocabulary as text."""
        known = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        raw = (bytes(known[c] for c in word if c in known) for word in self._words)
        return [word.decode("utf-8", "ignore") for word in raw]


class FastEncoder:
    """Encodes ids with gigatoken, and knows which texts it may be given."""

    def __init__(self, tokenizer: TextTokenizer, table: ByteTable) -> None:
        """Build and prove it; raises Unproven with the reason."""
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError as error:
            raise Unproven(f"gigatoken is not installed ({error})") from error
        self._load: Any = load_hf_json
        self._tokenizer = tokenizer
        self._table = table
        self._json = table.complete_json(tokenizer.files["tokenizer.json"])
        self._known = np.zeros(0x110000, dtype=np.bool_)
        self._known[:0x80] = True
        self._refuted: set[str] = set()
        self._rebuild()
        self._prove([*("".join(p) for p in product(_ALPHABET, repeat=3)), *table.words()])

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of a text without `refuted` characters; ids from the table's size on are unknown bytes."""
        if self._grown > _CACHE_BYTES or self._text > _CACHE_TEXT:
            self._rebuild()
        if len(text) < _MEASURED_CHARS:
            ids: npt.NDArray[np.uint32] = self._backend.encode(text)
            return ids
        before = _resident_bytes()
        ids = self._backend.encode(text)
        after = _resident_bytes()
        if before is None or after is None:
            self._text += len(text)
        else:
            self._grown += max(0, after - before - ids.nbytes)
        return ids

    def refuted(self, texts: Sequence[str]) -> set[str]:
        """Return the characters of `texts` that the two encoders treat differently; each is looked at once."""
        codes = [_codes(text) for text in texts if not text.isascii()]
        if not codes:
            return set()
        together = np.concatenate(codes)
        new = np.unique(together[~self._known[together]])
        if len(new):
            self._look_at([chr(code) for code in new])
        return self._refuted if self._refuted else set()

    def _rebuild(self) -> None:
        self._backend: Any = None
        try:
            self._backend = self._load(self._json)
        except Exception as error:  # gigatoken raises several kinds, also bare ones
            raise Unproven(f"gigatoken cannot read the tokenizer: {str(error).splitlines()[0]}") from error
        self._grown = self._text = 0

    def _prove(self, texts: list[str]) -> None:
        texts = [text for text in texts if self._table.accepts(text)]
        for text, own in zip(texts, self._tokenizer.encode_ids(texts), strict=True):
            if not self._equal(text, own):
                raise Unproven(f"gigatoken gives other ids for {text!r}")

    def _look_at(self, characters: list[str]) -> None:
        # Each as a letter, a mark or a space would show: after and before letters, digits, blanks, quotes and itself.
        texts = [f"a{c}a {c}1{c} \n{c}'s {c}{c}!{c}\n {c}" for c in characters]
        for c, text, own in zip(characters, texts, self._tokenizer.encode_ids(texts), strict=True):
            self._known[ord(c)] = True
            # What the tokenizer would normalise in this company is proven where it stands alone.
            if not (self._equal(text, own) if self._table.accepts(text) else self._equal(*self._alone(c))):
                self._refuted.add(c)

    def _alone(self, character: str) -> tuple[str, npt.NDArray[np.uint32]]:
        text = f"\n{character}\n"
        return text, self._tokenizer.encode_ids([text])[0]

    def _equal(self, text: str, own: npt.NDArray[np.uint32]) -> bool:
        ids = self._backend.encode(text)
        return np.array_equal(ids[ids < self._table.size], own)


def _require_byte_level(spec: dict[str, Any]) -> None:
    model, normalizer = spec["model"], spec.get("normalizer") or {}
    before = spec.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if model.get("type") != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise Unproven("the tokenizer is not byte-level BPE")
    if any(step.get("type") == "ByteLevel" and step.get("add_prefix_space") for step in steps):
        raise Unproven("the tokenizer adds a space before a text")
    if any(step.get("behavior") == "Removed" for step in steps):
        raise Unproven("the tokenizer removes characters")
    odd = [key for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd or model.get("byte_fallback") or normalizer.get("type") not in (None, "NFC"):
        raise Unproven(f"the tokenizer has {', '.join(odd) or 'a normalizer or byte fallback'}")
    for token in spec["added_tokens"]:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise Unproven(f"the added token {token['content']} takes its surroundings with it")


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _resident_bytes() -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return int(_STATM.read_text().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return None
