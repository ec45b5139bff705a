"""A cache that lies in an object store: prepared data are fetched from there, and published once they are built.

What is published of an entry are its files, and for each large file of documents two more, by which it is fetched in
blocks (:mod:`tuner.stores.blocks`): `<name>.blocks`, and `<name>.rest`, which is all of it but its token ids: what says
where documents lie, how long they are and what of them is trained. All but token ids is in its place from the start.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.data.building.cache import build_once, lock_path, valid
from tuner.data.prepared import id_spans
from tuner.errors import MachineError
from tuner.runtime import files
from tuner.runtime.lock import FileLock
from tuner.stages import url_of
from tuner.stores.blocks import BLOCKS, STORED, block_hashes
from tuner.stores.client import Client
from tuner.stores.directory import find_entry, publish_entry
from tuner.stores.transfer import download, open_file

if TYPE_CHECKING:
    from tuner.runtime.console import Console
    from tuner.stores.commit import Commit

REST = ".rest"
BLOCK_BYTES = 1 << 20
"""Of a file that is fetched in blocks: a divisor of :data:`tuner.stores.transfer.PART_BYTES`."""
WHOLE_BYTES = 16 << 20
"""Documents of at most so many bytes are fetched whole."""


def settle(final: Path, console: Console | None) -> None:
    """Fetch prepared data that the cache's store has and the cache has not; the other way round, publish them.

    Nothing is published without a console, where a publish that fails is a warning. What came from an entry that the
    store no longer has goes. Raises MachineError where the store cannot be read, DataError.
    """
    client = Client.connect(str(url_of(final)))
    commit, kept = find_entry(client), final / STORED
    if kept.is_file() and (commit is None or kept.read_bytes() != commit.document()):
        with FileLock(lock_path(final)):
            files.discard_dir(final)
    if commit is not None:
        build_once(final.parent.parent, "prepared", final.name, partial(_fetch, client, commit, console), console)
    elif console is not None and valid(final, "prepared") is not None:
        try:
            _publish(client, final, console)
        except MachineError as error:
            console.warn(f"not published: {error.message}; the next launch with this data.cache_dir tries again")


def _publish(client: Client, final: Path, console: Console) -> None:
    """Upload an entry, by one process of a machine at a time. Raises MachineError."""
    prefix = f"{files.TMP_PREFIX}{final.name}-"
    with files.machine_errors(final), FileLock(lock_path(final)), files.scratch_dir(prefix, final.parent) as scratch:
        if find_entry(client) is not None:
            return
        console.say("store", f"publishing {client.url}")
        rest = {}
        for path in final.glob("*.documents.arrow"):
            if path.stat().st_size > WHOLE_BYTES:
                scratch.joinpath(path.name + BLOCKS).write_bytes(block_hashes(path, BLOCK_BYTES))
                rest[path.name] = _write_rest(path, scratch / (path.name + REST))
        paths = (path for directory in (final, scratch) for path in sorted(directory.iterdir()))
        opened = (file for path in paths if (file := open_file(path, path.name, 0)) is not None)
        publish_entry(client, opened, {"block": BLOCK_BYTES, "rest": rest})


def _fetch(client: Client, commit: Commit, console: Console | None, tmp: Path) -> dict[str, Any]:
    """The files of an entry, large documents without their ids; its manifest."""
    rest = commit.note["rest"]
    whole = {name: file for name, file in commit.files.items() if name not in rest}
    if console is not None:
        size, later = (files.gib(sum(commit.files[name].size for name in names)) for names in (whole, rest))
        console.say("store", f"fetching {client.url}: {size}; documents as they are read: {later}")
    download(client, ((files.inside(tmp, name), file) for name, file in whole.items()))
    for name, ranges in rest.items():
        with (tmp / (name + REST)).open("rb") as source, files.opened(files.inside(tmp, name), files.NEW) as target:
            os.truncate(target, commit.files[name].size)
            for start, stop in ranges:
                os.pwrite(target, source.read(stop - start), start)
        os.unlink(source.name)
    (tmp / STORED).write_bytes(commit.document())
    return files.read_json(tmp / files.MANIFEST_NAME)


def _write_rest(documents: Path, rest: Path) -> list[tuple[int, int]]:
    """Write all bytes of a file but its ids, a record batch at a time; where they lie."""
    edges = [0, *(edge for span in id_spans(documents) for edge in span), documents.stat().st_size]
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    with documents.open("rb") as source, rest.open("wb") as file:
        for start, stop in ranges:
            file.write(os.pread(source.fileno(), stop - start, start))
    return ranges
