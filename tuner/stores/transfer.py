"""Files on their way into a store and out of it, in parts, in parallel, hashed on the way.

A file is put as objects of :data:`PART_BYTES` each, not as one multipart upload: every part is whole or absent and seen
in a listing, so that a process that was killed leaves nothing hidden, on any store. At most :data:`IN_FLIGHT`
parts are in memory, 128 MiB in all, however large the files and however many.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from tuner.errors import DataError
from tuner.runtime.files import NEW, machine_errors, opened
from tuner.stores.client import Client
from tuner.stores.commit import StoredFile

PART_BYTES = 16 << 20
IN_FLIGHT = 8
SMALL_BYTES = 1 << 20
"""A file of at most so many bytes is read to memory when the snapshot is taken, as long as all do not exceed
:data:`SNAPSHOT_BYTES`; the others are kept open."""
SNAPSHOT_BYTES = 32 << 20


@dataclass
class OpenFile:
    """A file as it was when the snapshot was taken: its first `size` bytes, whatever becomes of its name."""

    name: str
    status: os.stat_result
    looked: int
    """When, in nanoseconds."""
    file: BinaryIO
    """Open since then; of a small file its bytes."""
    held: int = 0
    """How many of them are in memory."""
    stored: StoredFile | None = None
    """What the last commit has of this name and size: it is kept where the bytes are the same."""

    @property
    def size(self) -> int:
        """Bytes to be uploaded."""
        return self.status.st_size

    def part(self, start: int, length: int) -> bytes:
        """Bytes from `start`. Raises DataError where the file was cut meanwhile, MachineError."""
        with machine_errors(Path(self.name)):
            self.file.seek(start)
            data = self.file.read(length)
        if len(data) < length:
            raise DataError(f"{self.name}: was cut to {start + len(data):,} bytes while it was uploaded")
        return data


@dataclass(eq=False)
class StageSnapshot:
    """A directory at one moment: files that the last commit has already, and open ones that are to be uploaded."""

    directory: Path
    note: Mapping[str, Any]
    inside: tuple[str, ...] = ("",)
    """How names begin that are as they are here; others are as the store has them."""
    base: Collection[str] = ()
    """The keys of what the last commit had then, which all that is not uploaded is of."""
    kept: dict[str, StoredFile] = field(default_factory=dict)
    opened: list[OpenFile] = field(default_factory=list)
    closed: bool = False

    def close(self) -> None:
        """Give all descriptors back; without a publish nothing was sent."""
        self.closed = True
        for each in self.opened:
            each.file.close()


def open_file(path: Path, name: str, room: int) -> OpenFile | None:
    """A file for a snapshot, in memory where it is small and there is room; None where it is gone. MachineError."""
    with machine_errors(path), suppress(FileNotFoundError):
        source = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
        found = OpenFile(name, os.fstat(source.fileno()), time.time_ns(), source)
        if found.size <= min(SMALL_BYTES, room):
            with source:
                found.file, found.held = BytesIO(found.part(0, found.size)), found.size
        return found
    return None


def upload(client: Client, files: Iterable[OpenFile]) -> dict[str, StoredFile]:
    """Put files under new keys; what is stored, by name. Raises MachineError, and then nothing refers to what was put.

    The parts of all files go through one pool; this thread reads and hashes the next while they are sent.
    """
    stored: dict[str, StoredFile] = {}
    sent: set[Future[None]] = set()
    with ThreadPoolExecutor(IN_FLIGHT, "store upload") as pool:
        try:
            for file in files:
                with file.file:
                    if file.stored is not None and _digest(file) == file.stored.sha256:
                        stored[file.name] = file.stored
                        continue
                    target = StoredFile(str(uuid.uuid4()), file.size, "", PART_BYTES)
                    digest = hashlib.sha256()
                    for key, start, length in target.parts():
                        done, sent = wait(sent, None if len(sent) == IN_FLIGHT else 0, FIRST_COMPLETED)
                        for each in done:
                            each.result()
                        data = file.part(start, length)
                        sent.add(pool.submit(client.put, key, data))
                        digest.update(data)
                    stored[file.name] = StoredFile(target.key, file.size, digest.hexdigest(), PART_BYTES)
            for each in sent:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return stored


def _digest(file: OpenFile) -> str:
    digest = hashlib.sha256()
    for start in range(0, file.size, PART_BYTES):
        digest.update(file.part(start, min(PART_BYTES, file.size - start)))
    return digest.hexdigest()


class GoneError(DataError):
    """An object that a commit names is no longer there: a newer commit has replaced it meanwhile."""


def download(client: Client, files: Iterable[tuple[Path, StoredFile]]) -> None:
    """Write files that must not be there yet. Raises GoneError, DataError where bytes differ, MachineError.

    At most :data:`IN_FLIGHT` parts are on their way, of each a chunk in memory; its parts are hashed in order, while
    others arrive, and flushed to the disk.
    """
    with ThreadPoolExecutor(IN_FLIGHT, "store download") as pool:
        wanted: list[tuple[Path, StoredFile, list[Future[None]]]] = []
        try:
            for path, file in files:
                with machine_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with opened(path, NEW) as descriptor:
                        os.truncate(descriptor, file.size)
                parts = [pool.submit(_fetch, client, path, key, start, length) for key, start, length in file.parts()]
                wanted.append((path, file, parts))
            for path, file, parts in wanted:
                _check(client.url, path, file, parts)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _fetch(client: Client, path: Path, key: str, start: int, length: int) -> None:
    """One part into its place. Raises GoneError, DataError, MachineError."""
    with machine_errors(path), opened(path, os.O_WRONLY | os.O_NOFOLLOW) as descriptor:
        size = client.read(key, descriptor, start, length)
    if size is None:
        raise GoneError(f"{client.url}: {key} is gone")
    if size != length:
        raise DataError(f"{client.url}: {key} has {size:,} bytes, its commit says {length:,}")


def _check(url: str, path: Path, file: StoredFile, parts: list[Future[None]]) -> None:
    """Wait for a file's parts in order and hash what they wrote. Raises what they raised, DataError."""
    digest = hashlib.sha256()
    with machine_errors(path), opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
        for part, (_, start, length) in zip(parts, file.parts(), strict=True):
            part.result()
            digest.update(os.pread(descriptor, length, start))
        os.fsync(descriptor)
    if digest.hexdigest() != file.sha256:
        raise DataError(f"{url}: {path.name} arrived with other bytes than its commit names")
