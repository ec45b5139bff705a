"""The run's append-only records: metrics.jsonl and samples.jsonl."""

import io
from pathlib import Path
from typing import Any

import jsonlines

from tuner.runtime.files import fsync_dir, fsync_path, machine_errors, write_atomic

REPEATED = (None, "eval")
"""Kinds of lines that an evaluation which is repeated writes again; samples have none."""


class Records:
    """A JSONL file whose lines are buffered and written together; a no-op without a path (ranks other than 0).

    What touches the disk raises MachineError.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Buffer one line."""
        if self._path is not None:
            self._lines.append(line)

    def flush(self) -> None:
        """Write what is buffered."""
        if self._path is None or not self._lines:
            return
        with machine_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            jsonlines.Writer(file).write_all(self._lines)
        self._lines.clear()

    def sync(self) -> None:
        """Wait until all that was flushed is on the disk, as before a checkpoint commits. Any thread may do so."""
        if self._path is None or not self._path.exists():
            return
        with machine_errors(self._path):
            fsync_path(self._path)
            fsync_dir(self._path.parent)

    def read(self) -> list[dict[str, Any]]:
        """The lines of the file, without a last one cut short by a crash; none without a file."""
        if self._path is None or not self._path.exists():
            return []
        with machine_errors(self._path), jsonlines.open(self._path) as reader:
            return list(reader.iter(type=dict, skip_invalid=True))

    def drop_after(self, step: int, evaluates: bool = False) -> None:
        """Drop the lines after ``step``, and a last line cut short by a crash: they will be written again.

        Where the launch begins with the evaluation of the step, what an earlier one wrote of it is dropped, too.
        """
        if self._path is None or not self._path.exists():
            return
        lines = [line for line in self.read() if line["step"] <= step]
        kept = [line for line in lines if not evaluates or line["step"] < step or line.get("kind") not in REPEATED]
        text = io.StringIO()
        jsonlines.Writer(text).write_all(kept)
        write_atomic(self._path, text.getvalue().encode())
