"""The state of a source tree under git, read without running anything that its configuration names."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, Any, cast

DIFF_BYTES = 256 << 10
"""More of a diff is cut."""
MOST_UNTRACKED = 200
LIMIT_S = 10.0
"""Seconds that all questions about one tree may take together."""
# What a configuration may name to be run. Filters (large files, notebooks) have names of their own: they are asked for.
_NOTHING_RUNS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "core.pager=cat", "diff.external=")
_FILTERS = r"^filter\..*\.(clean|smudge|process|required)$"
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", "HEAD")


@dataclass(frozen=True)
class SourceTree:
    """A working tree: its commit, what differs from it, and which files it does not know, by name alone."""

    root: str
    commit: str
    branch: str | None
    dirty: bool
    untracked: tuple[str, ...]
    more_untracked: bool
    diff: bytes
    """Against the commit, at most DIFF_BYTES of it."""
    diff_cut: bool

    def facts(self) -> dict[str, Any]:
        """All but the diff, as JSON values."""
        return {
            "root": self.root,
            "commit": self.commit,
            "branch": self.branch,
            "dirty": self.dirty,
            "untracked": list(self.untracked),
            "more_untracked": self.more_untracked,
            "diff_cut": self.diff_cut,
        }


def source_tree(directory: Path) -> SourceTree | None:
    """The working tree that holds `directory`; None without git, outside of one, before a commit, or out of time."""
    git = _Git(directory, time.monotonic() + LIMIT_S, _NOTHING_RUNS)
    found = git.line("rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return None
    root, _, commit = found.rpartition("\n")
    filters = git.read(1 << 16, "config", "--name-only", "-z", "--get-regexp", _FILTERS) or (b"", False)
    off = [f"{name}={'false' if name.endswith('.required') else ''}" for name in _names(filters[0])]
    git = _Git(directory, git.deadline, (*_NOTHING_RUNS, *off))
    diff = git.read(DIFF_BYTES, *_DIFF)
    names = git.read(DIFF_BYTES, "-C", root, "ls-files", "-z", "--others", "--exclude-standard")
    if diff is None or names is None:
        return None
    untracked = _names(names[0])
    text, cut = diff
    return SourceTree(
        root=root,
        commit=commit,
        branch=git.line("symbolic-ref", "--short", "-q", "HEAD"),
        dirty=bool(text),
        untracked=tuple(untracked[:MOST_UNTRACKED]),
        more_untracked=names[1] or len(untracked) > MOST_UNTRACKED,
        diff=text[: text.rfind(b"\n") + 1] if cut else text,
        diff_cut=cut,
    )


@dataclass(frozen=True)
class _Git:
    """Questions to git about one directory, until a moment of the monotonic clock."""

    directory: Path
    deadline: float
    settings: tuple[str, ...]
    """`key=value` each, above whatever the configuration says."""

    def line(self, *arguments: str) -> str | None:
        """A one-line answer; None where git has none."""
        answer = self.read(1 << 16, *arguments)
        return None if answer is None else answer[0].decode(errors="backslashreplace").strip()

    def read(self, most: int, *arguments: str) -> tuple[bytes, bool] | None:
        """At most so many bytes of an answer, and whether there was more; None where git fails or takes too long."""
        settings = [word for setting in self.settings for word in ("-c", setting)]
        command = ["git", "--no-pager", *settings, "-C", str(self.directory), *arguments]
        try:
            process = Popen(command, env=_environment(), stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, process_group=0)
        except (OSError, ValueError):
            return None

        def end() -> None:
            if process.poll() is None:  # with whatever it started
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(0.0, self.deadline - time.monotonic()), end)
        with process:
            timer.start()
            data = cast("IO[bytes]", process.stdout).read(most + 1)
            if len(data) > most:
                end()
        timer.cancel()
        cut = len(data) > most
        return (data[:most], cut) if cut or process.returncode == 0 else None


def _environment() -> dict[str, str]:
    """The environment without what would point git elsewhere, or make it run, ask or write."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _names(text: bytes) -> list[str]:
    """What git lists with `-z`."""
    return [name.decode(errors="backslashreplace") for name in text.split(b"\0")[:-1]]
