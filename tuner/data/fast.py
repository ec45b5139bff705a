"""The fast encoder: gigatoken, its memory bounded."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.byte_table import ByteTable, Unproven
from tuner.data.tokenizer import TextTokenizer

_STATM = Path("/proc/self/statm")
_CACHE_BYTES = 64 << 20
"""Growth of the process in its calls after which the encoder, which remembers every word it met, is built anew."""
_CACHE_TEXT = 64 << 20
"""The same in characters of text, where growth cannot be read."""
_MEASURED_CHARS = 1 << 16
"""Growth in a call with a shorter text is not measured."""


class FastEncoder:
    """Encodes texts to ids with gigatoken; ids from the table's size on stand for bytes the tokenizer does not know."""

    name = "gigatoken"

    def __init__(self, tokenizer: TextTokenizer, table: ByteTable) -> None:
        """Build it; raises Unproven where it is not installed or cannot read the tokenizer."""
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError as error:
            raise Unproven(f"gigatoken is not installed ({error})") from error
        self._load: Any = load_hf_json
        self._json = table.complete_json(tokenizer.files["tokenizer.json"])
        self._rebuild()

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the ids of a text."""
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

    def _rebuild(self) -> None:
        self._backend: Any = None
        try:
            self._backend = self._load(self._json)
        except Exception as error:  # gigatoken raises several kinds, also bare ones
            raise Unproven(f"gigatoken cannot read the tokenizer: {str(error).splitlines()[0]}") from error
        self._grown = self._text = 0


def _resident_bytes() -> int | None:
    if sys.platform != "linux":
        return None
    try:
        return int(_STATM.read_text().split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return None
