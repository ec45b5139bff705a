"""What the rungs of a ladder measured at their marks, read from their runs. Nothing here needs torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import step_name
from tuner.ladder.record import Ladder, RungRecord
from tuner.ladder.rules import Phase, PlannedMark, mark_name
from tuner.rundir.last_checkpoint import problem_of
from tuner.rundir.layout import CHECKPOINTS
from tuner.rundir.record import NOT_FIGURES, read_run, summary
from tuner.rundir.run_json import is_run

FIRST = ("rung", "parameters", "total_parameters", "multiple", "phase", "step", "tokens", "loss")
"""The columns that every mark has, in their order; one for each other figure follows."""
_TIMES = "_s"
"""The end of keys that are seconds."""


@dataclass(frozen=True)
class Mark:
    """A rung's held-out loss, and whatever else was evaluated, before or after the decay of a period."""

    rung: str
    parameters: int
    """Without the input embedding."""
    total_parameters: int
    multiple: float
    """Of the ladder's `tokens`, at which the period ends."""
    phase: Phase
    step: int
    tokens: int
    """Trained until then, as the run counted them."""
    loss: float | None
    """In nats per token; None where the evaluation gave none that is finite."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Every other figure of the evaluation by its name in metrics.jsonl."""

    def row(self) -> dict[str, object]:
        """The mark as one row of a table."""
        return {name: getattr(self, name) for name in FIRST} | dict(self.figures)


def read_marks(ladder: Ladder) -> list[Mark]:
    """The marks that rungs have reached, by rung and step. Raises DataError for a run that cannot be read."""
    return [mark for rung in ladder.rungs for mark in marks_of(rung, ladder.run_dir(rung))]


def marks_of(rung: RungRecord, run_dir: Path) -> list[Mark]:
    """The marks that one rung has reached; none where it was not started."""
    return list(_reached(rung, run_dir)) if is_run(run_dir) else []


def _reached(rung: RungRecord, run_dir: Path) -> Iterator[Mark]:
    wanted = {mark.step for mark in rung.marks}
    tokens = {0: 0}
    evaluated: dict[int, Mapping[str, object]] = {}
    for line in read_run(run_dir).lines():
        if line["step"] not in wanted:
            continue
        if line.get("kind") == "train":
            tokens[line["step"]] = int(line["tokens"])
        elif line.get("kind") == "eval":
            evaluated[line["step"]] = line
    for mark in rung.marks:
        if mark.step in evaluated and mark.step in tokens:
            figures = evaluated[mark.step]
            loss = figures.get("loss")
            yield Mark(
                rung.name,
                rung.parameters,
                rung.total_parameters,
                mark.multiple,
                mark.phase,
                mark.step,
                tokens[mark.step],
                float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
                _figures(figures),
            )


def _figures(evaluated: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in evaluated.items()
        if name not in NOT_FIGURES
        and not name.endswith(_TIMES)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def marks_csv(marks: Sequence[Mark]) -> str:
    """The marks as CSV with a line of names; a figure that a mark does not have is empty."""
    others = sorted({name for mark in marks for name in mark.figures})
    text = io.StringIO()
    writer = csv.DictWriter(text, (*FIRST, *others), lineterminator="\n")
    writer.writeheader()
    for mark in marks:
        writer.writerow({name: "" if value is None else value for name, value in mark.row().items()})
    return text.getvalue()


def places(ladder: Ladder) -> list[dict[str, Any]]:
    """Where the checkpoint of each mark is, or will be, as JSON values: ``path``, and whether a valid one is there."""
    return [_place(ladder, rung, mark) for rung in ladder.rungs for mark in rung.marks]


def _place(ladder: Ladder, rung: RungRecord, mark: PlannedMark) -> dict[str, Any]:
    path = ladder.run_dir(rung) / CHECKPOINTS / step_name(mark.step)
    return {
        "rung": rung.name,
        "name": mark_name(mark.multiple, mark.phase),
        **asdict(mark),
        "path": str(path),
        "exists": path.is_dir() and problem_of(path) is None,
    }


_NOT_STARTED: Mapping[str, Any] = {"status": "not started", "step": 0, "tokens": None, "seconds": 0}


def statuses(ladder: Ladder) -> list[dict[str, Any]]:
    """Each rung as JSON values: the figures of `tuner runs show`, and its marks.

    A rung of which no run is there yet is `not started`. Raises DataError for a run that cannot be read.
    """
    return [_status(ladder, rung) for rung in ladder.rungs]


def _status(ladder: Ladder, rung: RungRecord) -> dict[str, Any]:
    path = ladder.run_dir(rung)
    run = summary(read_run(path)) if is_run(path) else _NOT_STARTED
    marks = marks_of(rung, path)
    return {
        **run,
        "name": rung.name,
        "path": str(path),
        "parameters": rung.parameters,
        "total_steps": rung.total_steps,
        "marks": len(rung.marks),
        "marks_reached": len(marks),
        "newest_mark": marks[-1].row() if marks else None,
    }
