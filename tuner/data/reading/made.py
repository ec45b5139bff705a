"""Records that code of the user's own yields: written down as JSON Lines, which is what everything else reads.

The code runs once in a process, where the data are looked for or prepared. With a ``content_key`` of the function,
called with the same arguments, what it yielded is kept under that key, and it runs again only where the key is another.
"""

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.data.reading.spool import without_name
from tuner.errors import DataError, PluginError
from tuner.runtime.files import TMP_PREFIX, machine_errors
from tuner.runtime.plugins import Group, load, naming, require_call, source_file

GROUP: Group = "tuner.data_sources"
KEPT = "sources"
"""Of the cache: what sources with a content key yielded."""
KEY = "content_key"


def check_source(use: str, args: Mapping[str, Any]) -> Callable[..., Iterable[Any]]:
    """The function that ``use`` names, which takes these arguments; it is not called. Raises PluginError."""
    plugin = load(use, GROUP, Path("/"))
    require_call(plugin, use, (), args)
    return plugin


def made(use: str, args: Mapping[str, Any], cache: Path | None) -> Path:
    """A file of the records that the function yields. Raises PluginError, DataError and MachineError."""
    plugin = check_source(use, args)
    key = getattr(plugin, KEY, None)
    if key is None or cache is None:
        return _spooled(use, json.dumps(args, sort_keys=True))
    with naming(f"{use}.{KEY}", source_file(plugin)):
        said = key(**args)
    if not isinstance(said, str) or not said:
        raise PluginError(f"{use}.{KEY} returned {said!r}, and has to return a text that changes with the records")
    name = hashlib.sha256(json.dumps([use.rpartition(":")[2], said, args], sort_keys=True).encode()).hexdigest()[:32]
    path = cache / KEPT / f"{name}.jsonl"
    if not path.is_file():
        with machine_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{TMP_PREFIX}{path.name}-", delete=False) as file:
                try:
                    file.writelines(_lines(plugin, use, args))
                    file.flush()
                    os.fsync(file.fileno())
                except BaseException:
                    os.unlink(file.name)
                    raise
            os.replace(file.name, path)
    return path


@functools.cache
def _spooled(use: str, args: str) -> Path:
    given = json.loads(args)
    return without_name(_lines(check_source(use, given), use, given))


def _lines(plugin: Callable[..., Iterable[Any]], use: str, args: Mapping[str, Any]) -> Iterator[bytes]:
    number = 0
    with naming(use, source_file(plugin), passing=(DataError,)):
        for number, record in enumerate(plugin(**args), start=1):
            if not isinstance(record, Mapping):
                raise DataError(f"{use}: record {number} is a {type(record).__name__}, and has to be a mapping")
            try:
                line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(f"{use}: record {number} is no JSON: {error}") from error
            yield line.encode() + b"\n"
    if not number:
        raise DataError(f"{use}: it yielded no record")
