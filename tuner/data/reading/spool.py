"""Records from elsewhere than files as a file, hashed first and read afterwards: standard input, or what code yields.

The file has no name, so that nothing of it is left however the process ends; its children reach it by the path, too.
Code of the user's own yields records that are written as JSON Lines. It runs once in a process, where the data are
looked for or prepared. With a ``content_key`` of the function, called with the same arguments, what it yielded is kept
under that key, and it runs again only where the key is another.
"""

import atexit
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.errors import DataError, PluginError
from tuner.runtime.files import TMP_PREFIX, machine_errors
from tuner.runtime.plugins import Group, load, naming, require_call, source_file

_COPY_BYTES = 1 << 20


@functools.cache
def spooled() -> Path:
    """Copy standard input to a file, once for the process. DataError for a terminal, MachineError."""
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("-: standard input is a terminal", hint="redirect a file or a pipe to it")
    return without_name(iter(lambda: sys.stdin.buffer.read(_COPY_BYTES), b""))


def without_name(lines: Iterable[bytes]) -> Path:
    """Write a file without a name; where it is for this process and its children. MachineError."""
    with machine_errors(Path(tempfile.gettempdir())):
        file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process)
        try:
            file.writelines(lines)
            file.flush()
        except BaseException:
            file.close()
            raise
    atexit.register(file.close)
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


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
