"""What a shell offers to complete: runs, recipes, keys of the recipe and their values. Nothing here needs torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Offer = tuple[str, str]
"""What to type, and what it is."""


def runs(incomplete: str) -> list[Offer]:
    """The runs under ./runs by name, newest first, and directories that begin as `incomplete` does."""
    return [*_runs(incomplete), *_paths(incomplete, only_directories=True)]


def models(incomplete: str) -> list[Offer]:
    """Runs, and directories."""
    return runs(incomplete)


def recipes(incomplete: str) -> list[Offer]:
    """Recipes in files, and those that ship."""
    from tuner.config.shipped import shipped_recipes, summary

    shipped = [(name, summary(path)) for name, path in shipped_recipes().items() if name.startswith(incomplete)]
    files = [(text, said) for text, said in _paths(incomplete) if text.endswith(("/", ".yaml", ".yml"))]
    return [*files, *shipped]


def keys(incomplete: str) -> list[Offer]:
    """The recipe's keys as flags."""
    from tuner.config.fields import fields

    if not incomplete.startswith("--"):
        return []
    found = [(f"--{key}", field.sentence) for key, field in fields().items() if key != "version"]
    return [(flag, sentence) for flag, sentence in found if flag.startswith(incomplete)]


def values(key: str, incomplete: str) -> list[Offer]:
    """What may be written for a key: its words, or files for a path."""
    from tuner.config.fields import find
    from tuner.config.value_types import Choice, Switch

    field = find(key.replace("-", "_"))
    kind = None if field is None else field.value_type
    words: Sequence[str] = ()
    if isinstance(kind, Choice):
        words = [str(word) for word in (*kind.values, *kind.words)]
    elif isinstance(kind, Switch):
        words = ["true", "false", *kind.words]
    elif kind is not None:
        words = [str(word) for word in kind.words]
    offered = [(word, "") for word in words if word.startswith(incomplete)]
    return offered or _paths(incomplete)


def _runs(incomplete: str) -> list[Offer]:
    from tuner.rundir.run_json import is_run

    try:
        found = sorted((entry for entry in Path("runs").iterdir() if is_run(entry)), key=_modified, reverse=True)
    except OSError:
        return []
    return [(path.name, "run") for path in found if path.name.startswith(incomplete)]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _paths(incomplete: str, only_directories: bool = False) -> list[Offer]:
    """Files and directories that begin with a text; hidden ones only where the text asks for them."""
    directory, start = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(os.path.expanduser(directory) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    found = []
    for entry in entries:
        if not entry.name.startswith(start) or (entry.name.startswith(".") and not start.startswith(".")):
            continue
        is_directory = entry.is_dir()
        if is_directory or not only_directories:
            found.append((os.path.join(directory, entry.name) + ("/" if is_directory else ""), ""))
    return found
