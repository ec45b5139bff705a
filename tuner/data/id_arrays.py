"""Arrays of token ids on disk: `.npy` files, flat files of a stated type, and Megatron's, which have an index file.

Their headers are read here; the ids themselves are mapped into memory. OLMo-core's `.npy` files are flat: no header.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from tuner.errors import DataError

_NUMPY, _MEGATRON = b"\x93NUMPY", b"MMIDIDX\0\0"
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_CODES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's numbers of types; those of floats are no ids."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class IdArray:
    """Where the ids of a file lie, what parts them into documents, and how they are cut into rows."""

    dtype: str
    """As numpy writes it, such as `<u2`."""
    offset: int
    """Bytes before the first id."""
    count: int
    """Ids in the file."""
    end: int | None | Literal["auto"] = "auto"
    """The id that ends a document; None: the file is not parted; auto: the tokenizer's, or what the index says."""
    sequences: int = 0
    """Of the index; 0 where there is none."""
    documents: int = 0
    """Entries of the index that say where documents begin and end."""
    row: int | None = None
    """Ids of a row, where they are cut into rows."""
    before: int = 0
    """Ids of the file that are left out before the first one."""
    is_whole: bool = False
    """Whether what does not fill a row is left out."""

    @property
    def overlap(self) -> int:
        """Ids that a row begins with again: Megatron's rows share one, so that every id but the first is a target."""
        return int(self.is_whole and self.sequences > 0)

    @property
    def is_indexed(self) -> bool:
        """Whether the index says what the documents are."""
        return self.sequences > 0 and self.end == "auto"

    def within(self, start: int, stop: int) -> "IdArray":
        """The ids [start, stop) alone."""
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return replace(self, offset=offset, count=stop - start, before=self.before + start)

    def mapped(self, path: Path) -> npt.NDArray[Any]:
        """The file's ids [count], not read yet. OSError."""
        if not self.count:
            return np.empty(0, dtype=self.dtype)
        return np.memmap(path, dtype=self.dtype, mode="r", offset=self.offset, shape=(self.count,))

    def document_ends(self, path: Path) -> Ints:
        """Of a file with an index: int64[documents], the position after each one's last id. DataError, OSError."""
        lengths = np.memmap(path, "<i4", "r", _HEADER.itemsize, (self.sequences,))
        pointers = np.memmap(path, "<i8", "r", _HEADER.itemsize + lengths.nbytes, (self.sequences,))
        at = _HEADER.itemsize + lengths.nbytes + pointers.nbytes
        documents = np.memmap(path, "<i8", "r", at, (self.documents,))
        ends = np.cumsum(lengths, dtype=np.int64)
        after = pointers // np.dtype(self.dtype).itemsize + lengths
        lengths_fit = np.array_equal(after, ends) and int(ends[-1]) == self.count and int(lengths.min()) >= 0
        if not lengths_fit or documents[0] != 0 or documents[-1] != self.sequences or (np.diff(documents) < 0).any():
            raise DataError(f"{path}: what the index says does not fit the {self.count:,} ids next to it")
        found: Ints = np.unique(ends[documents[1:][documents[1:] > 0] - 1])
        return found


def opened(path: Path, index: Path | None, dtype: str, end: int | None | Literal["auto"]) -> IdArray:
    """The array of a file, by its own header or by that of its index, else of the stated type. DataError, OSError."""
    size = path.stat().st_size
    stated = None if dtype == "auto" else np.dtype(dtype).newbyteorder("<").str
    with path.open("rb") as file:
        head = file.read(len(_NUMPY))
    if index is not None:
        array = _indexed(index, size, end)
    elif head == _NUMPY:
        try:
            values = open_memmap(path, mode="r")  # refuses objects
        except (ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable array: {error}") from error
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise DataError(f"{path}: {values.dtype} {values.shape}, and an array of token ids is a line of integers")
        array = IdArray(values.dtype.str, values.offset, len(values), end)
    elif stated is None:
        raise DataError(f"{path}: no header says of which type its ids are", hint="write dtype: uint16, or another")
    else:
        count, rest = divmod(size, np.dtype(stated).itemsize)
        if rest:
            raise DataError(f"{path}: {size:,} bytes are no whole number of ids of the type {dtype}")
        array = IdArray(stated, 0, count, end)
    if stated is not None and stated != array.dtype:
        raise DataError(f"{path}: its ids are {np.dtype(array.dtype).name} by its header", hint="remove dtype")
    return array


def _indexed(path: Path, size: int, end: int | None | Literal["auto"]) -> IdArray:
    with path.open("rb") as file:
        head = np.frombuffer(file.read(_HEADER.itemsize).ljust(_HEADER.itemsize, b"\0"), dtype=_HEADER)[0]
    magic = head["magic"].ljust(len(_MEGATRON), b"\0")
    if magic != _MEGATRON or head["version"] != 1 or int(head["code"]) not in _CODES:
        raise DataError(f"{path}: not an index of Megatron's, version 1, for ids")
    sequences, documents = int(head["sequences"]), int(head["documents"])
    least = _HEADER.itemsize + 12 * sequences + 8 * documents
    if sequences < 1 or documents < 2 or path.stat().st_size < least:
        raise DataError(f"{path}: the index is cut off or empty")
    dtype = _CODES[int(head["code"])]
    return IdArray(dtype, 0, size // np.dtype(dtype).itemsize, end, sequences, documents)
