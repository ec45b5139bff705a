"""Splitting a command line before Typer reads it: Typer would take an unknown flag for the argument."""

from __future__ import annotations

import re
from collections.abc import Sequence

_OVERRIDE = re.compile(r"--([A-Za-z][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
_ALONE = "--fit"
"""Takes a value or none, which Typer does not know."""
_NO_SIZE = re.compile(r"-.*|.*\.ya?ml")
_TOP = re.compile(r"--(version|name|seed|output_dir|output-dir|hooks)(?:=(.*))?", re.DOTALL)


def split(args: Sequence[str], takes_recipe: bool) -> tuple[list[str], list[tuple[str, str | None]]]:
    """Return what is left for Typer, and the `--section.key value` flags as (key, value).

    A flag takes the text after `=`, or the next argument unless that is a flag (then its value is None).
    With `takes_recipe` the keys at the recipe's top (`--name`, `--seed`, `--output_dir`, `--hooks`, ...) are taken too.
    Nothing is taken after `--`. A `--fit` without a size gets an empty one.
    """
    rest: list[str] = []
    flags: list[tuple[str, str | None]] = []
    position = 0
    while position < len(args):
        token = args[position]
        position += 1
        if token == "--":
            return [*rest, token, *args[position:]], flags
        if token == _ALONE and (position == len(args) or _NO_SIZE.fullmatch(args[position])):
            rest += [token, ""]
            continue
        match = _OVERRIDE.fullmatch(token) or (_TOP.fullmatch(token) if takes_recipe else None)
        if match is None:
            rest.append(token)
            continue
        value = match[2]
        if value is None and position < len(args) and not args[position].startswith("--"):
            value = args[position]
            position += 1
        flags.append((match[1], value))
    return rest, flags
