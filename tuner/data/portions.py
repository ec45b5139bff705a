"""The portions in which a recipe's sources are read, one after the other.

A portion is prepared data of its own, under a key of its own; which one is next is said by the section that divides
(``DataSection.portions``).
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.portions import Late, Portion
from tuner.data.sources import expand, local_slice
from tuner.errors import DataError

if TYPE_CHECKING:
    from tuner.config.recipe import DataSection, DataSource


def next_portion(data: DataSection, done: Sequence[Portion], passes: int | None = 1) -> Portion | Late | None:
    """The portion after those that are done or left out; None where there are no more. Raises DataError.

    It is late, too, as long as held-out rows of its own are not there.
    """
    divided = data.portions
    assert divided is not None  # asked of divided data alone
    found = divided.next_portion(data.train, done, _files, passes)
    if isinstance(found, Portion) and isinstance(data.eval, tuple):
        for written, source in zip(data.eval, divided.sources_of(data.eval, found.name), strict=True):
            if divided.may_come_later(written) and not _files(source, False):
                return Late(found.name, f"{source.path}: no such file")
    return found


def first_portion(data: DataSection) -> Portion | None:
    """The first portion, for whoever looks at data without training on it; None where data are not divided.

    Raises DataError where it is not there.
    """
    if data.portions is None:
        return None
    found, noun = next_portion(data, ()), data.portions.noun
    if isinstance(found, Late):
        raise DataError(f"{noun} {found.name}: {found.missing}", hint=f"the first {noun} is not there yet")
    assert found is not None  # there is a name, or a file
    return found


def _files(source: DataSource, needed: bool) -> list[str]:
    """The files of a source by name; none where it is not there, unless they are `needed`. DataError."""
    path = Path(source.path)
    if not needed and not path.is_file() and local_slice(source.path) is None and not _lists_any(path):
        return []
    return [str(file.path) for file in expand([source])]


def _lists_any(path: Path) -> bool:
    """Whether a directory has a file whose name is not hidden, or a glob finds one."""
    if path.is_dir():
        return any(file.is_file() and file.suffix and not file.name.startswith(".") for file in path.rglob("*"))
    return any(Path(name).is_file() for name in glob.glob(str(path), recursive=True))
