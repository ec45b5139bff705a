"""Columns that a model gives prepared rows, on disk: built in parts that survive a kill, then published as a whole.

    <cache>/<level>/<key>/<split>.<column>.npy   one array for each column, in the order of the rows; `manifest.json`
    <cache>/<level>/.tmp-<key>-parts/            while they are computed: `<split>-<part>.npz`, each durable by itself

A column is an array whose first axis runs over whatever a row has of it (its documents, its trained positions), row
after row; its type and its other axes are its own. Arrays are mapped into memory when they are opened.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap, read_array

from tuner.data.building.cache import ColumnLevel, Entry, build_held, cache_path, damages, lock_path, valid
from tuner.errors import DataError, VerificationError
from tuner.runtime.files import discard_dir, file_entries, machine_errors, read_json, verify_entries, write_atomic
from tuner.runtime.lock import FileLock

PART_ROWS = 128
"""Rows of a part: what a kill costs at most."""
Columns = dict[str, npt.NDArray[Any]]


class Builder:
    """The parts of one key, by whoever holds its lock."""

    def __init__(self, final: Path, level: ColumnLevel) -> None:
        self._final, self._level = final, level
        # Another size of parts is another directory: it is left to `tuner data gc`.
        self._parts = final.parent / f".tmp-{final.name}-parts{PART_ROWS}"
        with machine_errors(self._parts):
            self._parts.mkdir(exist_ok=True)

    def has(self, split: str, number: int) -> bool:
        """Whether a part is there, whole."""
        return _read(self._path(split, number)) is not None

    def add(self, split: str, number: int, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Keep a part; it is on the disk when this returns. Raises MachineError."""
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **columns)
        write_atomic(self._path(split, number), buffer.getvalue())

    def publish(self, parts: Mapping[str, int], body: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> None:
        """Make the columns of ``parts`` parts of each split the key's directory, with this body of its manifest.

        Raises VerificationError where ``wanted``, the files' sizes and hashes of before, are not these; MachineError.
        """

        def make(tmp: Path) -> dict[str, Any]:
            for split, count in parts.items():
                _write_arrays(tmp, split, [self._path(split, number) for number in range(count)])
            if wanted is not None and file_entries(tmp) != wanted:
                raise VerificationError(f"{self._final}: computed again, the columns are not those of before")
            return dict(body)

        try:
            build_held(self._final, self._level, make)
        finally:
            discard_dir(self._parts)

    def _path(self, split: str, number: int) -> Path:
        return self._parts / f"{split}-{number:08}.npz"


@contextmanager
def building(cache_dir: Path, level: ColumnLevel, key: str) -> Iterator[Builder | None]:
    """Hold the key's lock for the length of the block: what builds it, or None where it is there, every byte of it.

    Raises MachineError: without a cause where somebody else holds the lock, else where nobody can.
    """
    final = cache_path(cache_dir, level, key)
    with machine_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_path(final), wait=False):
        if is_wrong := bool(damages(Entry(level, final, valid(final, level)))):
            discard_dir(final)
        yield Builder(final, level) if is_wrong else None


def open_columns(path: Path, level: ColumnLevel, verify: bool = False) -> dict[str, Columns]:
    """The columns of a directory by split and name; file sizes are always checked, SHA-256 sums with ``verify``.

    Raises DataError naming what is missing or damaged.
    """
    manifest = valid(path, level)
    if manifest is None:
        raise DataError(f"{path}: no whole directory of columns")
    verify_entries(path, manifest["files"], hash=verify)
    found: dict[str, Columns] = {}
    for name in sorted(manifest["files"]):
        split, column, _ = name.split(".")
        try:
            found.setdefault(split, {})[column] = open_memmap(path / name, mode="r")  # refuses objects
        except (OSError, ValueError) as error:
            raise DataError(f"{path / name}: not a readable array: {error}") from error
    return found


def files_of(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of each file of a directory of columns, as its manifest has them."""
    return dict(read_json(path / "manifest.json")["files"])


def _array(part: zipfile.ZipFile, name: str) -> npt.NDArray[Any]:
    with part.open(name) as file:
        return np.asarray(read_array(file, allow_pickle=False))


def _read(path: Path) -> Columns | None:
    """The arrays of a part, checked by the sums that the archive holds; None where it is not there or damaged."""
    try:
        with zipfile.ZipFile(path) as part:
            return {name.removesuffix(".npy"): _array(part, name) for name in part.namelist()}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _write_arrays(directory: Path, split: str, paths: Sequence[Path]) -> None:
    """Write the parts' arrays end to end, one file for each column, with one part in memory at a time.

    Raises DataError for a part that is not there, and for parts that do not fit together.
    """
    shapes: dict[str, tuple[np.dtype[Any], tuple[int, ...], int]] = {}
    for path in paths:
        for name, values in _part(path).items():
            dtype, rest, length = shapes.get(name, (values.dtype, values.shape[1:], 0))
            if (dtype, rest) != (values.dtype, values.shape[1:]):
                raise DataError(f"{path}: {name} is {values.dtype} {values.shape[1:]}, and {dtype} {rest} before")
            shapes[name] = (dtype, rest, length + len(values))
    with ExitStack() as opened:
        files = {}
        for name, (dtype, rest, length) in shapes.items():
            files[name] = opened.enter_context((directory / f"{split}.{name}.npy").open("wb"))
            facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length, *rest)}
            np.lib.format.write_array_header_1_0(files[name], facts)
        for path in paths:
            for name, values in _part(path).items():
                files[name].write(np.ascontiguousarray(values).data)


def _part(path: Path) -> Columns:
    found = _read(path)
    if found is None:
        raise DataError(f"{path}: a part of the columns is damaged", hint="run the same command again")
    return found
