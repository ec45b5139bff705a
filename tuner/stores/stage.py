"""The local side of a store directory: which of its files are as they were, and how it is brought to a commit.

Next to the stage lies `.NAME.store.json`: the commit that the stage is based on, and of each file that is known its
size, time of change, inode and SHA-256, so that a file that was not touched is not read again. What differs from a
commit is downloaded next to the stage, checked, and renamed into its place.
"""

from __future__ import annotations

import glob
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tuner.errors import DataError
from tuner.runtime import files
from tuner.runtime.files import TMP_PREFIX, TRASH_PREFIX, machine_errors, read_json, sha256_file, write_json
from tuner.stores.client import Client
from tuner.stores.commit import Commit, StoredFile
from tuner.stores.transfer import download

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


def wholes(names: Collection[str]) -> dict[str, str]:
    """Name -> the outermost directory with a manifest above it, which is whole or absent: a checkpoint."""
    manifest = f"/{files.MANIFEST_NAME}"
    roots = sorted((name.removesuffix(manifest) for name in names if name.endswith(manifest)), reverse=True)
    return {name: root for root in roots for name in names if name.startswith(f"{root}/")}  # the outermost comes last


class Bringing:
    """A stage on its way to a commit. `local` names at its top are left alone; `only` and `spared` as in a fetch."""

    def __init__(
        self, stage: Path, commit: Commit, state: StageState, local: Collection[str] = (), spared: str | None = None
    ) -> None:
        self.stage, self.commit, self.state = stage, commit, state
        self.aside: Path | None = None
        """Where files went that were changed here and are not of the commit."""
        self._local, self._spared, self._whole = local, spared, wholes(commit.files.keys())
        self._changed: set[str] = set()

    def bring(self, client: Client, only: Callable[[str], bool] | None) -> None:
        """Download and replace. Raises GoneError, DataError, MachineError; killed, the next fetch does the rest."""
        names = {name for name in self.commit.files if only is None or only(name)}
        roots = {self._whole[name] for name in names if name in self._whole}
        names |= {name for name, root in self._whole.items() if root in roots}
        if self.stage.is_dir():
            found = entries(self.stage, self._local)
            self._changed = {name for name, status in found if self.state.known(name, status) is None}
        differing = {name for name in names if not self._is_same(name)}
        roots = {self._whole[name] for name in differing if name in self._whole}
        differing |= {name for name, root in self._whole.items() if root in roots}
        self.state.commit_id = None
        files.make_dirs(self.stage)
        self.state.write(self.stage)
        prefix = f"{files.TMP_PREFIX}{self.stage.name}.store-"
        for leftover in self.stage.parent.glob(f"{glob.escape(prefix)}*"):
            files.discard_dir(leftover)
        with files.machine_errors(self.stage), files.scratch_dir(prefix, self.stage.parent) as scratch:
            self._fill(client, scratch, differing)
            if only is None:
                self._clear()
            for root in sorted(roots):
                files.make_dirs((target := self.stage / root).parent)
                (files.replace_dir if target.is_dir() else files.publish_dir)(scratch / root, target)
            for name in sorted(name for name in differing if self._whole.get(name) not in roots):
                self._place(scratch / name, name)
        for name in differing:
            if self.commit.files[name].link is None:
                self.state.learn(name, (self.stage / name).lstat(), self.commit.files[name].sha256)
        self.state.commit_id = self.commit.commit_id if only is None else None
        self.state.write(self.stage)

    def _is_same(self, name: str) -> bool:
        path, file = files.inside(self.stage, name), self.commit.files[name]
        if file.link is not None:
            return path.is_symlink() and os.readlink(path) == file.link
        return self.state.sha256(self.stage, name) == file.sha256

    def _fill(self, client: Client, scratch: Path, differing: set[str]) -> None:
        """Everything that is to be placed, below `scratch`."""
        wanted: list[tuple[Path, StoredFile]] = []
        for name in sorted(differing):
            path, file = files.inside(scratch, name), self.commit.files[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.link is not None:
                os.symlink(safe_link(client.url, name, file.link), path)
            else:
                wanted.append((path, file))
        download(client, wanted)

    def _clear(self) -> None:
        """Remove what the commit does not have; what was changed here since it was known is set aside."""
        for name, _ in list(entries(self.stage, self._local)):
            if name not in self.commit.files and name.split("/")[0] != self._spared:
                if name in self._changed:
                    self._set_aside(name)
                else:
                    (self.stage / name).unlink()
                self.state.files.pop(name, None)
        for directory, _, _ in os.walk(self.stage, topdown=False):
            if directory != str(self.stage) and not os.listdir(directory):
                os.rmdir(directory)

    def _set_aside(self, name: str) -> None:
        number = f"{self.commit.number}-{secrets.token_hex(3)}"
        self.aside = self.aside or self.stage.with_name(f".{self.stage.name}.aside-{number}")
        (self.aside / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.stage / name, self.aside / name)

    def _place(self, source: Path, name: str) -> None:
        target = self.stage / name
        if name in self._changed and not target.is_symlink() and target.is_file():
            self._set_aside(name)
        files.make_dirs(target.parent)
        os.replace(source, target)
        files.fsync_dir(target.parent)
