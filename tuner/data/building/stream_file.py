"""Arrow IPC stream files of which several processes write the record batches, each in a place that it is given.

Such a file is the schema, the batches one after another, and an end mark. Whoever knows the sizes of the batches and
their order knows where each belongs, and needs none of their bytes.
"""

import errno
import hashlib
import os
import threading
from collections import deque
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pyarrow as pa

from tuner.runtime.files import HASH_BLOCK_BYTES, write_all

FLUSH_BYTES = 128 << 20
"""Written bytes that are not yet on the disk: few, so that committing the file waits for few."""
_END = b"\xff\xff\xff\xff\0\0\0\0"


class Place(NamedTuple):
    """Where a record batch belongs."""

    path: Path
    offset: int


class StreamFiles:
    """Files that grow, one after the other, by numbered record batches that others write."""

    def __init__(self, schema: pa.Schema) -> None:
        """`schema` is that of all files."""
        self._schema = schema
        self._files: dict[Path, _StreamFile] = {}
        self._by_number: dict[int, _StreamFile] = {}

    def place(self, number: int, path: Path, size: int) -> Place:
        """Take the next place in a file that is there, for batch `number` of so many bytes."""
        self._by_number[number] = self._files[path]
        return self._files[path].place(number, size)

    def require(self, path: Path, hash_behind: bool) -> None:
        """Create a file where it is not there, and end the one before, to which no batch is added any more. OSError.

        With `hash_behind` the file is hashed in a thread while it is written.
        """
        if path not in self._files:
            for before in list(self._files.values())[-1:]:
                before.end()
            self._files[path] = _StreamFile(path, self._schema, hash_behind)

    def filled(self, number: int) -> None:
        """Note that batch `number` is written; batches may come in any order."""
        self._by_number.pop(number).filled(number)

    def entries(self) -> dict[str, Any]:
        """End the last file; return the manifest's entries, by name, of what was hashed behind. OSError."""
        for last in list(self._files.values())[-1:]:
            last.end()
        found = ((path.name, file.entry()) for path, file in self._files.items())
        return {name: entry for name, entry in found if entry is not None}

    def __enter__(self) -> "StreamFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class _StreamFile:
    """One such file."""

    def __init__(self, path: Path, schema: pa.Schema, hash_behind: bool) -> None:
        self._path = path
        self._size = _written(path, 0, schema.serialize(), os.O_CREAT | os.O_EXCL)
        self._open: deque[tuple[int, int]] = deque()
        """(number, end) of batches from the first on that is not written."""
        self._filled: set[int] = set()
        self._hash = HashBehind(path) if hash_behind else None

    def place(self, number: int, size: int) -> Place:
        place = Place(self._path, self._size)
        self._size += size
        self._open.append((number, self._size))
        return place

    def filled(self, number: int) -> None:
        self._filled.add(number)
        while self._open and self._open[0][0] in self._filled:
            first, end = self._open.popleft()
            self._filled.remove(first)
            if self._hash is not None:
                self._hash.reach(end)

    def end(self) -> None:
        """Write the end mark behind the last place, whether or not all of them are filled."""
        self._size = _written(self._path, self._size, _END)

    def entry(self) -> dict[str, Any] | None:
        """Size and SHA-256 of the file, which is whole; None where it was not hashed."""
        return None if self._hash is None else {"size": self._size, "sha256": self._hash.hexdigest(self._size)}

    def close(self) -> None:
        if self._hash is not None:
            self._hash.close()


def write_batch(place: Place, message: pa.Buffer) -> None:
    """Write a record batch as `RecordBatch.serialize` gives it. OSError."""
    _written(*place, message)


def _written(path: Path, offset: int, data: bytes | pa.Buffer, flags: int = 0) -> int:
    """Write `data` at `offset`; return where it ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
    try:
        os.lseek(descriptor, offset, os.SEEK_SET)
        write_all(descriptor, memoryview(data))
    finally:
        os.close(descriptor)
    return offset + len(data)


class HashBehind:
    """Hashes a file in a thread while it is written, as far as it is whole from its start, and flushes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._error: OSError | None = None
        self._ends: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def reach(self, end: int) -> None:
        """Let the thread hash up to here."""
        self._ends.put(end)

    def hexdigest(self, size: int) -> str:
        """SHA-256 of the file's `size` bytes. OSError."""
        self.reach(size)
        self.close()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def close(self) -> None:
        """End the thread, once it has done what it was told."""
        self._ends.put(None)
        self._thread.join()

    def _follow(self) -> None:
        buffer = memoryview(bytearray(HASH_BLOCK_BYTES))
        at = flushed = 0
        try:
            with self._path.open("rb", buffering=0) as file:
                while (end := self._ends.get()) is not None:
                    while at < end and (count := file.readinto(buffer[: end - at])):
                        self._digest.update(buffer[:count])
                        at += count
                        if at - flushed >= FLUSH_BYTES:
                            os.fsync(file.fileno())
                            flushed = at
                    if at < end:
                        raise OSError(errno.EIO, "shorter than what was written to it")
        except OSError as error:
            self._error = error
