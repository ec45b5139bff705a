"""Arrow IPC stream files to which record batches are appended, written and hashed in the background."""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from tuner.runtime.files import write_all

FLUSH_BYTES = 128 << 20
"""Written bytes that are not yet on the disk: few, so that committing the file waits for few."""
_END = b"\xff\xff\xff\xff\0\0\0\0"


class StreamFiles:
    """New files of one schema, one after the other: the schema, the record batches, and an end mark.

    What cannot be written is an OSError of the next call.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._entries: dict[str, dict[str, Any]] = {}
        self._descriptor: int | None = None
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def append(self, path: Path, batch: pa.Buffer | None) -> None:
        """Append a batch as `RecordBatch.serialize` gives it, or make sure that the file is there. OSError.

        The first call for another path ends the file before. Waits for the call before, so that few batches are held.
        """
        self._wait()
        self._last = self._thread.submit(self._append, path, batch)

    def entries(self) -> dict[str, dict[str, Any]]:
        """End the last file; return the manifest's entries, by name: size and SHA-256. OSError."""
        self._wait()
        self._end()
        return self._entries

    def __enter__(self) -> "StreamFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def _append(self, path: Path, batch: pa.Buffer | None) -> None:
        if path.name not in self._entries:
            self._end()
            self._descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL, 0o644)
            self._digest = hashlib.sha256()
            self._name, self._size, self._unflushed = path.name, 0, 0
            self._entries[path.name] = {}
            self._write(self._schema.serialize())
        if batch is not None:
            self._write(batch)

    def _end(self) -> None:
        if self._descriptor is not None:
            self._write(_END)
            os.close(self._descriptor)
            self._descriptor = None
            self._entries[self._name] = {"size": self._size, "sha256": self._digest.hexdigest()}

    def _write(self, data: pa.Buffer | bytes) -> None:
        assert self._descriptor is not None
        view = memoryview(data)
        write_all(self._descriptor, view)
        self._digest.update(view)
        self._size += len(view)
        self._unflushed += len(view)
        if self._unflushed >= FLUSH_BYTES:
            os.fsync(self._descriptor)
            self._unflushed = 0
