"""The chunks of which a shard file consists, and the hash by which it is known. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tuner.errors import DataError
from tuner.runtime.dist import cores
from tuner.runtime.files import HASH_BLOCK_BYTES, reading, regular_size

HASHERS = min(4, cores())
"""Threads that hash a file's chunks: one does 1 to 2 GB/s, less than a good disk writes."""
Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: `sizes` elements at `offsets`, row-major, in bytes `start` to `start + length` of `file`.

    `sha256` is of these bytes alone, so that a reader of some tensors need not read the whole file to trust them.
    """

    file: str
    start: Count
    length: Count
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    sha256: str


def verify_shard(path: Path, sha256: str, chunks: Collection[Chunk]) -> None:
    """Hash a shard file whose size is right. Raises DataError naming it when a byte, or the index's chunks, differ."""
    ordered = sorted(chunks, key=lambda chunk: (chunk.start, chunk.length))
    end = regular_size(path)
    for chunk in reversed(ordered):
        if chunk.start + chunk.length != end:
            raise DataError(f"{path}: the index's chunks do not fill it")
        end = chunk.start

    def sha256_of(chunk: Chunk) -> str:
        digest = hashlib.sha256()
        for block in _blocks(path, chunk.start, chunk.length):
            digest.update(block)
        return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=HASHERS, thread_name_prefix="sha256") as pool:
        for chunk, found in zip(ordered, pool.map(sha256_of, ordered), strict=True):
            if found != chunk.sha256:
                raise DataError(f"{path}: its SHA-256 differs from the index's, from byte {chunk.start:,} on")
    if shard_sha256(_blocks(path, 0, end), (chunk.sha256 for chunk in ordered)) != sha256:
        raise DataError(f"{path}: its SHA-256 differs from the manifest's")


def shard_sha256(header: Iterable[bytes | bytearray], of_chunks: Iterable[str]) -> str:
    """The hash by which a shard file is known: of its header, and of the SHA-256 of each chunk in the file's order.

    So every byte is hashed once, chunks can be hashed in parallel, and one chunk be checked without the others.
    """
    digest = hashlib.sha256()
    for block in header:
        digest.update(block)
    for of_chunk in of_chunks:
        digest.update(bytes.fromhex(of_chunk))
    return digest.hexdigest()


def _blocks(path: Path, start: int, length: int) -> Iterator[bytearray]:
    for at in range(start, start + length, HASH_BLOCK_BYTES):
        block = bytearray(min(HASH_BLOCK_BYTES, start + length - at))
        read_bytes(path, at, memoryview(block))
        yield block


def read_bytes(path: Path, start: int, view: memoryview) -> None:
    """Fill a view with the bytes of a file from `start`. Raises DataError where it ends early or cannot be read."""
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        while len(view):
            count = file.readinto(view)
            if not count:
                raise DataError(f"{path}: ends early")
            view = view[count:]
