"""An encoder that is used because it is shown to give the tokenizer's own ids.

It is shown at three times: on adversarial strings and a share of the vocabulary before the first use; on every
character above ASCII when it is first seen in the data, since libraries follow different versions of Unicode; and on
a sample of the user's records, by the encoder of examples. What it cannot be trusted with goes to the tokenizer itself.
"""

from collections.abc import Sequence
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tuner.data.encoding.byte_level import ByteTable, Unproven
from tuner.data.encoding.tokenizer import TextTokenizer

_ALPHABET = [*"aS1 \n\r\t!_", "'s", "'LL", "\u00a0", "\u00e9", "\u4e2d", "\u3000", "\U0001f600"]


class IdEncoder(Protocol):
    """Gives the ids of a text, and ids from the table's size on for bytes that the tokenizer does not know."""

    name: str

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return uint32[tokens]."""


class ProvenEncoder:
    """An encoder that gave the right ids when it was asked, and which texts it may be given."""

    def __init__(self, encoder: IdEncoder, tokenizer: TextTokenizer, table: ByteTable) -> None:
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
        codes = [_codes(text) for text in texts if not text.isascii()]
        if not codes:
            return set()
        together = np.concatenate(codes)
        new = np.unique(together[~self._known[together]])
        if len(new):
            self._look_at([chr(code) for code in new])
        return self._refuted if self._refuted else set()

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
                text, own = self._alone(c)  # noqa: PLW2901 (in its place)
            if not self._equal(text, own):
                self._refuted.add(c)

    def _alone(self, character: str) -> tuple[str, npt.NDArray[np.uint32]]:
        text = f"\n{character}\n"
        return text, self._tokenizer.encode_ids([text])[0]

    def _equal(self, text: str, own: npt.NDArray[np.uint32]) -> bool:
        ids = self.encode(text)
        return np.array_equal(ids[ids < self._table.size], own)


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
