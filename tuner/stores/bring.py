"""A stage brought to a commit: what differs is downloaded next to it, checked, and renamed into its place."""

import glob
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from tuner.runtime import files
from tuner.stores.client import Client
from tuner.stores.commit import Commit, StoredFile
from tuner.stores.download import download
from tuner.stores.stage import StageState, entries, safe_link


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
        self.stage = stage
        self.commit = commit
        self.state = state
        self.aside: Path | None = None
        """Where files went that were changed here and are not of the commit."""
        self._local = local
        self._spared = spared
        self._whole = wholes(commit.files.keys())
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
