"""Tables for people: columns of plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tuner.runtime.console import escape


def columns(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Lines of equally many cells, aligned in columns; those numbered in `right` (from 0) to the right."""
    cells = [[escape(text) for text in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
