"""The state of a source tree under git, read without running anything that its configuration names."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, SubprocessError, run
from typing import Any

DIFF_BYTES = 256 << 10
"""More of a diff is cut."""
MOST_UNTRACKED = 200
LIMIT_S = 10.0
"""Seconds that one question may take."""
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
    diff: bytes
    """Against the commit, whole lines of at most DIFF_BYTES."""

    def facts(self) -> dict[str, Any]:
        """All but the diff."""
        return {key: value for key, value in asdict(self).items() if key != "diff"}


def source_tree(directory: Path) -> SourceTree | None:
    """The working tree that holds `directory`; None without git, outside of one, before a commit, or out of time."""
    if (found := _line(_ask(directory, (), "rev-parse", "--show-toplevel", "HEAD"))) is None:
        return None
    root, _, commit = found.rpartition("\n")
    filters = _names(_ask(directory, (), "config", "--name-only", "-z", "--get-regexp", _FILTERS) or b"")
    off = [f"{name}={'false' if name.endswith('.required') else ''}" for name in filters]
    diff = _ask(directory, off, *_DIFF)
    names = _ask(directory, off, "-C", root, "ls-files", "-z", "--others", "--exclude-standard")
    if diff is None or names is None:
        return None
    return SourceTree(
        root=root, commit=commit, branch=_line(_ask(directory, off, "symbolic-ref", "--short", "-q", "HEAD")),
        dirty=bool(diff), untracked=tuple(_names(names)[:MOST_UNTRACKED]),
        diff=diff if len(diff) <= DIFF_BYTES else diff[: diff.rfind(b"\n", 0, DIFF_BYTES) + 1],
    )


def _ask(directory: Path, settings: Sequence[str], *arguments: str) -> bytes | None:
    """The answer of git under `key=value` settings above its configuration; None where it fails or takes too long."""
    above = [word for setting in (*_NOTHING_RUNS, *settings) for word in ("-c", setting)]
    command = ["git", "--no-pager", *above, "-C", str(directory), *arguments]
    with suppress(OSError, ValueError, SubprocessError):
        return run(command, env=_environment(), stdin=DEVNULL, capture_output=True, timeout=LIMIT_S, check=True).stdout
    return None


def _line(answer: bytes | None) -> str | None:
    return None if answer is None else answer.decode(errors="backslashreplace").strip()


def _environment() -> dict[str, str]:
    """The environment without what would point git elsewhere, or make it run, ask or write."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def _names(text: bytes) -> list[str]:
    """What git lists with `-z`."""
    return [name.decode(errors="backslashreplace") for name in text.split(b"\0")[:-1]]
