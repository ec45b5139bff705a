"""What was handed to the system, remembered so cheaply that a file read back can be held against it.

A file's SHA-256 costs more than writing it to a fast disk. It is computed once, of the bytes that the disk gives back;
that these are the bytes handed over is told from a weighted sum of each piece.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuner.errors import DataError

SECTOR = 4096
_SPREAD, _ODD = np.uint64(0x9E3779B97F4A7C16), np.uint64(1)
Piece = tuple[int, int]
"""Length in bytes and weighted sum of a piece of a file."""


def piece_of(data: memoryview | bytes) -> Piece:
    """These bytes as a piece of a file."""
    return len(data), weighted_sum(data)


def weighted_sum(data: memoryview | bytes) -> int:
    """Sum modulo 2^64 of the 64-bit words, those of each 4 KiB sector times an odd weight of its place.

    A flipped bit changes it, and so do sectors that are missing, doubled or in each other's place.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = len(flat) // SECTOR * SECTOR
    sums = flat[:whole].view(np.uint64).reshape(-1, SECTOR // 8).sum(axis=1, dtype=np.uint64)
    last = np.zeros(SECTOR, dtype=np.uint8)
    last[: len(flat) - whole] = flat[whole:]
    sums = np.append(sums, last.view(np.uint64).sum(dtype=np.uint64))
    return int((sums * (np.arange(len(sums), dtype=np.uint64) * _SPREAD | _ODD)).sum(dtype=np.uint64))


def sha256_of_same(path: Path, pieces: Sequence[Piece]) -> str | None:
    """SHA-256 of a file whose pieces are those; None where it holds anything else. Raises DataError."""
    digest = hashlib.sha256()
    same = True
    try:
        with path.open("rb") as file:
            for length, total in pieces:
                data = file.read(length)
                same = same and piece_of(data) == (length, total)
                digest.update(data)
            same = same and os.fstat(file.fileno()).st_size == sum(length for length, _ in pieces)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return digest.hexdigest() if same else None
