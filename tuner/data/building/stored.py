"""A cache that lies in an object store: prepared data are fetched from there, and published once they are built.

What is published of an entry are its files, and of large documents two more, by which they are fetched in blocks
(:mod:`tuner.stores.blocks`): `<name>.blocks`, and `<name>.rest`, which is all of the file but its token ids: what tells
where documents lie and how long they are, and what of them is trained. Whatever is read of a fetched file besides token
ids is in its place from the first moment.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.data.building.cache import build_once, lock_path
from tuner.data.prepared import PREPARED_SCHEMA, id_spans, mapped_stream
from tuner.errors import MachineError
from tuner.runtime.files import (
    MANIFEST_NAME,
    NEW,
    TMP_PREFIX,
    discard_dir,
    gib,
    inside,
    machine_errors,
    opened,
    read_json,
    scratch_dir,
    write_all,
)
from tuner.runtime.lock import FileLock
from tuner.stages import url_of
from tuner.stores.blocks import BLOCKS, STORED, block_hashes
from tuner.stores.client import Client
from tuner.stores.download import download
from tuner.stores.entry import find_entry, publish_entry
from tuner.stores.upload import open_file

if TYPE_CHECKING:
    from tuner.runtime.console import Console
    from tuner.stores.commit import Commit

REST = ".rest"
BLOCK_BYTES = 1 << 20
"""Of a file that is fetched in blocks: a divisor of :data:`tuner.stores.upload.PART_BYTES`."""
WHOLE_BYTES = 16 << 20
"""Documents of at most so many bytes are fetched whole."""


def bring(final: Path, console: Console | None) -> None:
    """Have the prepared data that a directory of the cache stands for, where its store has them and the cache has not.

    What was fetched from an entry that the store no longer has goes. Raises MachineError, DataError.
    """
    client = Client.connect(str(url_of(final)))
    commit, kept = find_entry(client), final / STORED
    if kept.is_file() and (commit is None or kept.read_bytes() != commit.document()):
        with FileLock(lock_path(final)):
            discard_dir(final)
    if commit is not None:
        build_once(final.parent.parent, "prepared", final.name, partial(_fetch, client, commit, console), console)


def publish(final: Path, console: Console | None) -> tuple[str, ...]:
    """Publish prepared data that were built here, where their store has none; a warning where that cannot be done."""
    client = Client.connect(str(url_of(final)))
    try:
        with (
            machine_errors(final),
            FileLock(lock_path(final)),
            scratch_dir(f"{TMP_PREFIX}{final.name}-", final.parent) as scratch,
        ):
            if (final / STORED).exists() or find_entry(client) is not None:
                return ()
            if console is not None:
                console.say("store", f"publishing {client.url}")
            for path in final.glob("*.documents.arrow"):
                if path.stat().st_size > WHOLE_BYTES:
                    scratch.joinpath(path.name + BLOCKS).write_bytes(block_hashes(path, BLOCK_BYTES))
                    _write_rest(path, scratch / (path.name + REST))
            paths = [*sorted(final.iterdir()), *sorted(scratch.iterdir())]
            files = (file for path in paths if (file := open_file(path, path.name, 0)) is not None)
            publish_entry(client, files, {"schema": PREPARED_SCHEMA, "block": BLOCK_BYTES})
    except MachineError as error:
        return (f"not published: {error.message}; the next launch with this data.cache_dir tries again",)
    return ()


def _fetch(client: Client, commit: Commit, console: Console | None, tmp: Path) -> dict[str, Any]:
    """The files of an entry, large documents without their ids; its manifest."""
    sparse = [name.removesuffix(BLOCKS) for name in commit.files if name.endswith(BLOCKS)]
    whole = [(inside(tmp, name), file) for name, file in commit.files.items() if name not in sparse]
    if console is not None:
        size, later = (sum(commit.files[name].size for name in names) for names in (commit.files, sparse))
        more = f", and {gib(later)} of documents as they are read" if sparse else ""
        console.say("store", f"fetching {client.url}: {gib(size - later)}{more}")
    download(client, whole)
    for name in sparse:
        rest = inside(tmp, name + REST)
        _place_rest(rest, inside(tmp, name), commit.files[name].size)
        rest.unlink()
    (tmp / STORED).write_bytes(commit.document())
    return read_json(tmp / MANIFEST_NAME)


def _write_rest(documents: Path, rest: Path) -> None:
    """All bytes of a file but its ids, then where they lie: int64[ranges, 2], and how many ranges there are."""
    spans = id_spans(*mapped_stream(documents))
    edges = [0, *(edge for span in spans for edge in span), documents.stat().st_size]
    ranges = np.array(edges, dtype="<i8").reshape(-1, 2)
    with documents.open("rb") as source, rest.open("wb") as file:
        for start, stop in ranges.tolist():
            file.write(os.pread(source.fileno(), stop - start, start))
        np.append(ranges, len(ranges)).astype("<i8").tofile(file)


def _place_rest(rest: Path, documents: Path, size: int) -> None:
    """Make a sparse file with all but its ids."""
    with rest.open("rb") as file, opened(documents, NEW) as target:
        os.truncate(target, size)
        file.seek(-8, os.SEEK_END)
        count = int(np.fromfile(file, "<i8", 1)[0])
        file.seek(-8 - 16 * count, os.SEEK_END)
        ranges = np.fromfile(file, "<i8", 2 * count).reshape(-1, 2)
        file.seek(0)
        for start, stop in ranges.tolist():
            os.lseek(target, start, os.SEEK_SET)
            write_all(target, file.read(stop - start))
