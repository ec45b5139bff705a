"""Tables for people: columns of plain text."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from typing import IO

UNBOUNDED = 1 << 20
_stdout_columns: ContextVar[int] = ContextVar("stdout_columns", default=UNBOUNDED)


def columns(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Lines of equally many cells, aligned in columns; those numbered in `right` (from 0) to the right."""
    cells = [[_escaped(text) for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def _escaped(text: str) -> str:
    from tuner.runtime.console import escape  # which loads rich: completing a word does without

    return escape(text)


def note_stdout(descriptor: int) -> None:
    """Remember how wide the terminal is that a command's result goes to; a file or a pipe has no width."""
    try:
        _stdout_columns.set(os.get_terminal_size(descriptor).columns or UNBOUNDED)
    except OSError:
        _stdout_columns.set(UNBOUNDED)


def terminal_columns(stream: IO[str]) -> int:
    """Columns of the terminal that a stream goes to; a file, a pipe and what is closed have no width."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or UNBOUNDED
    except (OSError, ValueError):
        return UNBOUNDED


def between_words(text: str, width: int, indent: int) -> str:
    """The lines of a text, those of more columns broken between words; a longer word, such as a path, stays whole."""
    return "\n".join(line if len(line) <= width else _broken(line, width, indent) for line in text.split("\n"))


def _broken(line: str, width: int, indent: int) -> str:
    after = " " * (len(line) - len(line.lstrip()) + indent)
    broken = textwrap.wrap(
        line, max(width, 20), subsequent_indent=after, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip
    return "\n".join(broken)


def stdout_columns() -> int:
    """Columns that a command's result may have."""
    return _stdout_columns.get()


def fitted(lines: Sequence[Sequence[str]], width: int, right: Collection[int] = ()) -> str:
    """The same in at most ``width`` columns: what does not fit stands in tables below, each with the first column.

    No cell is ever broken; a table of the first column and a single other one may be wider.
    """
    widths = [max(len(_escaped(line[i])) for line in lines) for i in range(len(lines[0]))]
    blocks: list[list[int]] = [[]]
    for i in range(1, len(widths)):
        taken = widths[0] + sum(widths[j] + 2 for j in blocks[-1])
        if blocks[-1] and taken + widths[i] + 2 > width:
            blocks.append([])
        blocks[-1].append(i)
    tables = [
        columns(
            [[line[i] for i in (0, *block)] for line in lines], [n for n, i in enumerate((0, *block)) if i in right]
        )
        for block in blocks
    ]
    return "\n\n".join(tables)
