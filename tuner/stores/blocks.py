"""A large file of a store's directory, read by blocks: sparse on this machine, and fetched where it is read.

No map says which blocks are here: each is hashed before its first use in a process, whoever wrote it and when, and one
that differs from what was published is fetched. So a process that is killed, a machine that loses its power and several
processes that write the same block at once leave nothing that could be taken for the file's bytes and is not.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from tuner.errors import DataError, MachineError
from tuner.runtime.files import machine_errors, opened
from tuner.stages import url_of
from tuner.stores.client import Client
from tuner.stores.commit import FILES, Commit
from tuner.stores.transfer import IN_FLIGHT, GoneError

BLOCKS, STORED = ".blocks", "store.json"
"""Next to a file that is sparse: the SHA-256 of each of its blocks, 32 bytes each, and the commit that it is of."""
ATTEMPTS = 3
"""How often a block is asked for whose bytes are others than the published ones."""


def block_hashes(path: Path, size: int) -> bytes:
    """The SHA-256 of each block of `size` bytes of a whole file. Raises OSError."""
    with path.open("rb") as file:
        return b"".join(hashlib.sha256(block).digest() for block in iter(lambda: file.read(size), b""))


class BlockFile:
    """The file at `path`, with :data:`BLOCKS` and :data:`STORED` next to it; for the threads of one process.

    How large a block is the note of the commit says: the parts of a stored file are multiples of it. Raises DataError
    where what is next to it is damaged, or it does not lie in the stage of its store.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._url = path, url_of(path.parent) or ""
        if not self._url:
            raise DataError(f"{path}: of this file only parts may be here, and here is not the stage of its store")
        with machine_errors(path):
            commit = Commit.read(str(path), path.with_name(STORED).read_bytes())
            self._hashes = path.with_name(path.name + BLOCKS).read_bytes()
        self._client = Client.connect(self._url)  # where everything is here, nothing is asked of the store
        self._file, self._block = commit.files[path.name], int(commit.note["block"])
        self.missing = set(range(len(self._hashes) // 32))
        """Blocks that were not hashed yet in this process."""
        self._coming: dict[int, Future[None]] = {}
        self._failed: BaseException | None = None
        self._mutex = Lock()
        self._pool = ThreadPoolExecutor(IN_FLIGHT, "store blocks")

    def need(self, spans: Iterable[tuple[int, int]], wait: bool = True) -> None:
        """Have the bytes [start, stop) of each span in the file; without `wait` they are only begun, in order.

        Raises GoneError where the store has the file no longer, DataError for other bytes than the published ones,
        MachineError.
        """
        size = self._block
        numbers = (number for start, stop in spans for number in range(start // size, -(-stop // size)))
        wanted = [number for number in dict.fromkeys(numbers) if number in self.missing]
        with self._mutex:
            for number in wanted:
                if number not in self._coming:
                    self._coming[number] = self._pool.submit(self._bring, number)
            coming = [self._coming[number] for number in wanted]
        for each in coming if wait else ():
            each.result()

    def _bring(self, number: int) -> None:
        if self._failed is not None:  # what waits in line is not asked of a store that does not answer
            raise self._failed
        start = number * self._block
        length = min(self._block, self._file.size - start)
        try:
            with machine_errors(self._path), opened(self._path, os.O_RDWR | os.O_NOFOLLOW) as descriptor:
                if not self._is_right(number, os.pread(descriptor, length, start)):
                    os.pwrite(descriptor, self._fetched(number, start, length), start)
        except (DataError, MachineError) as error:
            self._failed = error
            raise
        self.missing.discard(number)

    def _fetched(self, number: int, start: int, length: int) -> bytes:
        part, first = divmod(start, self._file.part)
        key = f"{FILES}/{self._file.key}/{part:05}"
        for _ in range(ATTEMPTS):
            data = self._client.part(key, first, length)
            if data is None:
                raise GoneError(f"{self._url}: {key} is gone", hint="run the same command again")
            if self._is_right(number, data):
                return data
        raise DataError(f"{self._url}: block {number} of {self._path.name} arrives with other bytes than its hash says")

    def _is_right(self, number: int, data: bytes) -> bool:
        return hashlib.sha256(data).digest() == self._hashes[32 * number : 32 * number + 32]
