"""The keys of a GGUF file, read without its arrays and tensors."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from tuner.errors import DataError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The kinds of values of the format, as `struct` calls them."""
_TEXT, _ARRAY = 8, 9
_MOST = 1 << 26
"""Bytes of a text, such as a template, at most."""


def read_keys(path: Path) -> dict[str, Any]:
    """Every key of a file with its value; an array is the number of its elements. Raises DataError."""
    try:
        with path.open("rb") as file:
            magic, version, _, count = _read(file, "4sIQQ")
            if magic != b"GGUF" or version < 2:  # noqa: PLR2004 - lengths of 8 bytes since
                raise ValueError(f"begins with {magic!r}, version {version}")
            return {_text(file): _value(file, *_read(file, "I")) for _ in range(count)}
    except (OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise DataError(f"{path}: is no readable GGUF file: {error}") from error


def _read(file: BinaryIO, form: str) -> tuple[Any, ...]:
    data = file.read(size := struct.calcsize(f"<{form}"))
    if len(data) < size:
        raise ValueError("ends early")
    return struct.unpack(f"<{form}", data)


def _text(file: BinaryIO) -> str:
    (length,) = _read(file, "Q")
    if length > _MOST:
        raise ValueError(f"a text of {length:,} bytes")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _read(file, _SCALARS[kind])[0]
    of, count = _read(file, "IQ")
    if of == _TEXT:
        for _ in range(count):
            file.seek(_read(file, "Q")[0], 1)
    else:
        file.seek(struct.calcsize(f"<{_SCALARS[of]}") * count, 1)
    return count
