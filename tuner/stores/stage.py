"""The local side of a store directory: which of its files are as they were, and what is to be uploaded of the others.

Next to the stage lies `.NAME.store.json`: the commit that the stage is based on, and of each file that is known its
size, time of change, inode and SHA-256, so that a file that was not touched is not read again.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tuner.errors import DataError
from tuner.runtime.files import TMP_PREFIX, TRASH_PREFIX, machine_errors, read_json, sha256_file, write_json

SCHEMA = 1
RACY_NS = 50_000_000
"""A file that changed this short before it was looked at may change again with the same time: it is read next time."""

Facts = tuple[int, int, int]


def facts_of(found: os.stat_result) -> Facts:
    """What tells that a file was not touched: size, time of change in nanoseconds, inode."""
    return found.st_size, found.st_mtime_ns, found.st_ino


def state_path(stage: Path) -> Path:
    """Where the state of a stage lies."""
    return stage.parent / f".{stage.name}.store.json"


@dataclass
class StageState:
    """What is known of a stage: the commit that it is based on, and of its files the facts and the SHA-256."""

    commit_id: str | None = None
    files: dict[str, tuple[Facts, str]] = field(default_factory=dict)

    @staticmethod
    def read(stage: Path) -> StageState:
        """The state of a stage; an empty one where there is none, or where nothing is left of what is known of it.

        A stage that was emptied, or removed and begun again, is based on nothing, so that the store wins there.
        """
        state = StageState()
        with suppress(DataError, KeyError, TypeError, ValueError, IndexError):
            content = read_json(state_path(stage))
            if content["schema"] == SCHEMA:
                files = {name: ((facts[0], facts[1], facts[2]), facts[3]) for name, facts in content["files"].items()}
                state = StageState(content["commit_id"], files)
        return state if any(state.is_there(name, found) for name, found in entries(stage, ())) else StageState()

    def write(self, stage: Path) -> None:
        """Keep it. Raises MachineError."""
        files = {name: [*facts, sha] for name, (facts, sha) in self.files.items()}
        content = {"schema": SCHEMA, "commit_id": self.commit_id, "files": files}
        write_json(state_path(stage), content)

    def learn(self, name: str, found: os.stat_result, sha256: str, looked: int = 1 << 63) -> None:
        """Keep what a file's bytes are, read at `looked` nanoseconds, unless they may have changed without a trace."""
        self.files[name] = facts_of(found), sha256 if looked - found.st_mtime_ns > RACY_NS else ""

    def is_there(self, name: str, found: os.stat_result) -> bool:
        """Whether a file is the one that was learned, as far as one can tell without reading it."""
        return name in self.files and self.files[name][0] == facts_of(found)

    def known(self, name: str, found: os.stat_result) -> str | None:
        """The SHA-256 of a file that has not been touched since it was learned."""
        return self.files[name][1] or None if self.is_there(name, found) else None

    def sha256(self, stage: Path, name: str) -> str | None:
        """The SHA-256 of a regular file of the stage, read where it is not known; None where there is none."""
        with suppress(OSError):
            looked, found = time.time_ns(), (stage / name).lstat()
            if stat.S_ISREG(found.st_mode):
                if (sha256 := self.known(name, found)) is None:
                    sha256 = sha256_file(stage / name)
                    self.learn(name, found, sha256, looked)
                return sha256
        return None


def entries(
    stage: Path, local: Collection[str], inside: tuple[str, ...] = ("",)
) -> Iterator[tuple[str, os.stat_result]]:
    """Name and status of each regular file and link below a stage, but of `local` names at its top and unfinished work.

    Only names that begin with one of `inside`. What goes away while it is looked at is left out.
    """
    pending: list[tuple[str, Path]] = [("", stage)]
    while pending:
        prefix, directory = pending.pop()
        with machine_errors(directory), suppress(FileNotFoundError), os.scandir(directory) as found:
            for entry in sorted(found, key=lambda each: each.name):
                if entry.name.startswith((TMP_PREFIX, TRASH_PREFIX)) or (not prefix and entry.name in local):
                    continue
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append((f"{name}/", Path(entry.path)))
                elif name.startswith(inside):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                            yield name, status




def safe_link(where: str, name: str, target: str) -> str:
    """The target of a link below a stage. Raises DataError where it leads out of it, or may do."""
    if target.startswith("/") or ".." in target.split("/"):
        raise DataError(
            f"{where}: {name} is a link to {target}, and only links to names next to them can be stored",
            hint="put what it leads to in its place",
        )
    return target
