"""Files on their way out of a store: parts in parallel, written as they arrive, hashed from what was written."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tuner.errors import DataError
from tuner.runtime.files import NEW, machine_errors, opened
from tuner.stores.client import Client
from tuner.stores.commit import StoredFile

IN_FLIGHT = 8


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
