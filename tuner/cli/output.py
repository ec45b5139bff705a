"""How a result is written: as one JSON document, whose schema ships with this file, or in columns for people."""

import json
import math
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from tuner.errors import RecipeError, TunerError

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).parent / "schemas" / "document.json"
Status = Literal["ok", "stopped", "failed"]


@dataclass
class Outcome:
    """What a command did.

    `result` is what goes to stdout: the artifact's path, or text when `is_text` is set. A stopped outcome has
    exit code 75. `artifacts` get `path` (or `text`) from `result`, but where `is_table` is set; `metrics` are numbers
    or JSON values; `next` is the command to run next.
    """

    result: str
    status: Status = "ok"
    exit_code: int = 0
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    next: str | None = None
    is_text: bool = False
    is_table: bool = False
    """Whether `result` shows people what `artifacts` hold: a document does without it."""
    error: dict[str, Any] | None = None
    """`type`, `message` and `hint` of an outcome that is failed although it has a result."""


def outcome_document(command: str, outcome: Outcome) -> dict[str, Any]:
    """Return the document of a command that finished or stopped."""
    main = {} if outcome.is_table else {("text" if outcome.is_text else "path"): outcome.result}
    return _document(command, outcome.status, outcome.exit_code) | {
        "artifacts": {key: _jsonable(value) for key, value in (main | outcome.artifacts).items()},
        "metrics": {key: _jsonable(value) for key, value in outcome.metrics.items()},
        "warnings": list(outcome.warnings), "next": outcome.next, "error": outcome.error,
    }


def failure_document(command: str, exit_code: int, kind: str, error: TunerError) -> dict[str, Any]:
    """Return the document of a command that failed, or that stopped without a result (exit code 75).

    The problems of a recipe are among it, each with its file, line, column, key and message.
    """
    status: Status = "stopped" if exit_code == 75 else "failed"
    told: dict[str, Any] = {"type": kind, "message": error.message or kind, "hint": error.hint}
    if isinstance(error, RecipeError) and error.problems[0].text:  # of a recipe, and not of the command's arguments
        told["problems"] = [problem.document() for problem in error.problems]
    return _document(command, status, exit_code) | {"error": told}


def write_document(document: dict[str, Any]) -> str:
    """Return the document on one line."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def read_document(line: str) -> dict[str, Any] | None:
    """Return the document that a line holds; None when it is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(value, dict) and value.get("schema_version") == SCHEMA_VERSION and "status" in value
    return value if known and type(value.get("exit_code")) is int and isinstance(value.get("artifacts"), dict) else None


def _document(command: str, status: Status, exit_code: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION, "command": command, "status": status, "exit_code": exit_code, "artifacts": {},
        "metrics": {}, "warnings": [], "next": None, "error": None,
    }


def _jsonable(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


UNBOUNDED = 1 << 20
_real_stdout: ContextVar[int] = ContextVar("real_stdout", default=1)


def columns(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Lines of equally many cells, aligned in columns; those numbered in `right` (from 0) to the right."""
    aligned = []
    for i, column in enumerate(zip(*lines, strict=True)):
        cells = [_escaped(text) for text in column]
        width = max(map(len, cells))
        aligned.append([text.rjust(width) if i in right else text.ljust(width) for text in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def _escaped(text: str) -> str:
    from tuner.runtime.console import escape  # which loads rich: completing a word does without

    return escape(text)


def note_stdout(descriptor: int) -> None:
    """Remember where a command's result goes."""
    _real_stdout.set(descriptor)


def terminal_columns(of: IO[str] | int) -> int:
    """Columns of the terminal that a stream or a descriptor leads to; a file, a pipe and what is closed have no width.
    """
    try:
        return os.get_terminal_size(of if isinstance(of, int) else of.fileno()).columns or UNBOUNDED
    except (OSError, ValueError):
        return UNBOUNDED


def between_words(text: str, width: int, indent: int) -> str:
    """The lines of a text, those of more columns broken between words; a longer word, such as a path, stays whole."""
    return "\n".join(line if len(line) <= width else _broken(line, width, indent) for line in text.split("\n"))


def _broken(line: str, width: int, indent: int) -> str:
    after = " " * (len(line) - len(line.lstrip()) + indent)
    return textwrap.fill(
        line, max(width, 20), subsequent_indent=after, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def real_stdout() -> int:
    """The descriptor that a command's result goes to, while 1 is stderr."""
    return _real_stdout.get()


def stdout_columns() -> int:
    """Columns that a command's result may have."""
    return terminal_columns(real_stdout())


def listed(lines: Mapping[str, str], width: int) -> str:
    """Names with a sentence each, in two columns: a sentence continues under itself, in at least 20 columns."""
    after = " " * (max(map(len, lines), default=0) + 2)
    width = max(width, len(after) + 20)
    fill = partial(textwrap.fill, width=width, subsequent_indent=after)
    return "\n".join(fill(line, initial_indent=name.ljust(len(after))) or name for name, line in lines.items())


def fitted(lines: Sequence[Sequence[str]], width: int, right: Collection[int] = ()) -> str:
    """The same in at most ``width`` columns: what does not fit stands in tables below, each with the first column.

    No cell is ever broken; a table of the first column and a single other one may be wider.
    """
    widths = [max(len(_escaped(line[i])) for line in lines) for i in range(len(lines[0]))]
    blocks = [[0]]
    for i in range(1, len(widths)):
        if len(blocks[-1]) > 1 and sum(widths[j] + 2 for j in blocks[-1]) + widths[i] > width:
            blocks.append([0])
        blocks[-1].append(i)
    return "\n\n".join(
        columns([[line[i] for i in block] for line in lines], [n for n, i in enumerate(block) if i in right])
        for block in blocks
    )
