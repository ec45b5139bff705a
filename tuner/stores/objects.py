"""Plain objects of a store, such as records and models that other tools put there: fetched to where they stand for.

What was fetched for a URL is remembered by its etags under `CACHE/stores/.etags`: other objects are fetched again, and
what the store no longer has is removed. An object is written under a temporary name, flushed and renamed.
"""

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import DataError, counted
from tuner.runtime.files import NEW, TMP_PREFIX, fsync_dir, machine_errors, opened, read_json, write_json
from tuner.runtime.lock import FileLock
from tuner.stages import STORES, cache_root, stage_of
from tuner.stores.client import Client

AT_ONCE = 8
_MAGIC = re.compile(r"[*?\[]")
_SLICE = re.compile(r"(?s)(.+)\[[^\[\]/]*\]")


class Listed(NamedTuple):
    """What a store says of an object, by its key in the bucket."""

    key: str
    etag: str
    size: int


def fetch_objects(url: str, say: Callable[[str], None]) -> int:
    """Fetch what a URL means: an object, all below a prefix, or what a glob matches; how many there are.

    ``rows.jsonl[:10%]`` is a slice of an object, of which all is fetched. Raises MachineError where the store cannot be
    read, DataError where an object changes while it is fetched.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, wanted = rest.rstrip("/").partition("/")
    client = Client.connect(f"{scheme}://{bucket}")
    found = _listed(client, wanted)
    if (cut := _SLICE.fullmatch(wanted)) is not None:
        found += _listed(client, cut[1])
    memory = cache_root() / STORES / ".etags" / f"{hashlib.sha256(url.encode()).hexdigest()[:24]}.json"
    with machine_errors(memory):
        memory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(memory.with_suffix(".lock")):  # several processes of one launch
        known: dict[str, Any] = {}
        with suppress(DataError):
            known = read_json(memory)
        places = {each: _place(client.url, each.key) for each in found}
        fresh = [each for each, path in places.items() if known.get(each.key) != each.etag or not _has(path, each.size)]
        if fresh:
            size = sum(each.size for each in fresh)
            say(f"fetching {counted(len(fresh), 'object')} of {url}, {size / 1e6:,.1f} MB")
        with ThreadPoolExecutor(AT_ONCE, "store objects") as pool:
            list(pool.map(lambda each: _fetch(client, each, places[each]), fresh))
        for key in known.keys() - {each.key for each in found}:
            _place(client.url, key).unlink(missing_ok=True)
        write_json(memory, {each.key: each.etag for each in found})
    return len(found)


def _listed(client: Client, wanted: str) -> list[Listed]:
    """The objects that a key, a prefix or a glob means, in order."""
    fixed = wanted if _MAGIC.search(wanted) is None else _MAGIC.split(wanted)[0].rpartition("/")[0]
    metas = client.metas(fixed)
    if fixed == wanted and (own := client.meta(wanted)) is not None:
        metas.append(own)
    found = sorted(Listed(each["path"], each["e_tag"], each["size"]) for each in metas)
    return found if fixed == wanted else [each for each in found if _matches(each.key.split("/"), wanted.split("/"))]


def _matches(names: list[str], pattern: list[str]) -> bool:
    """Whether a key's names are what a glob means; `**` are any number of directories."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        return _matches(names, pattern[1:]) or _matches(names[1:], pattern)
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _place(bucket: str, key: str) -> Path:
    """Where an object lies on this machine. Raises DataError for a key that is no path."""
    try:
        return stage_of(f"{bucket}/{key}")
    except ValueError as error:
        raise DataError(f"{bucket}/{key}: {error}", hint="rename the object, or name the others by a glob") from None


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fetch(client: Client, wanted: Listed, path: Path) -> None:
    """Write one object. Raises DataError where it is another by now, MachineError."""
    part = path.with_name(f"{TMP_PREFIX}{path.name}")
    with machine_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with opened(part, NEW) as descriptor:
            found = client.read(wanted.key, descriptor, etag=wanted.etag)
            os.fsync(descriptor)
        if found is None or not _has(part, wanted.size):
            part.unlink()
            message = f"{client.url}/{wanted.key}: changed while it was fetched"
            raise DataError(message, hint="run the same command again, once nobody writes there")
        os.replace(part, path)
        fsync_dir(path.parent)
