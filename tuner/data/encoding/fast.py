"""The fast encoder: gigatoken, its memory bounded."""

from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.encoding.byte_level import ByteTable, Unproven
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.runtime.memory import allocated_bytes, give_back, resident_bytes

_CACHE_BYTES = 32 << 20
"""Growth after which the encoder, which remembers every word that it met, is rebuilt: twice what prose needs."""
_LOOK_BYTES = 8 << 20
"""Growth of the process, which is cheap to read, after which the other is looked at again."""
_CACHE_TEXT = 32 << 20
"""The same in characters of text, where growth cannot be read."""
_MEASURED_CHARS = 1 << 16
"""Growth in a call with a shorter text is not measured."""


NOT_INSTALLED = "gigatoken is not installed: pip install 'tuner[fast]'"


def is_installed() -> bool:
    """Whether the package is there, which is an extra of this one."""
    return find_spec("gigatoken") is not None


class FastEncoder:
    """Encodes texts to ids with gigatoken; ids from the table's size on stand for bytes the tokenizer does not know."""

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
        if len(text) >= _MEASURED_CHARS and self._is_full(len(text)):
            self._rebuild()
        ids: npt.NDArray[np.uint32] = self._backend.encode(text)
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
