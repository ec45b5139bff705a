"""The header of a safetensors file, read within bounds: before a library opens a file that may be something else."""

import json
from pathlib import Path
from typing import Any

from tuner.errors import DataError

_LIMIT, _ALWAYS, _SHARE = 1 << 24, 1 << 20, 16
"""Bytes: of 100,000 tensors it has eleven million. One above the second takes no more than such a share of its file."""
_SIGNS, _MOST_SIGNS = (b",", b":", b"[", b"{"), 3
"""What makes an object of a header: one of so many bytes, or it is made to take memory."""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a file by name, as its header describes them, and the byte at which they begin. DataError."""
    try:
        with path.open("rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
            if length > min(_LIMIT, _ALWAYS + size // _SHARE) or 8 + length > size:
                raise DataError(f"{path}: not a safetensors file")
            text = file.read(length)
        if not text.startswith(b"{") or sum(map(text.count, _SIGNS)) * _MOST_SIGNS > length:
            raise DataError(f"{path}: not a safetensors file")
        header: Any = json.loads(text, object_pairs_hook=_each_once)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its header cannot be read: {error}") from error
    return {name: facts for name, facts in header.items() if name != "__metadata__"}, 8 + length


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these keys. Raises ValueError for one that is there twice: readers would take either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found
