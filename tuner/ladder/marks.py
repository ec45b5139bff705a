"""What the rungs of a ladder measured at their marks, read from their runs. Nothing here needs torch."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.ladder.record import LadderRecord, RungRecord
from tuner.ladder.rules import Phase, mark_name
from tuner.rundir.checkpoints import problem_of
from tuner.rundir.layout import CHECKPOINTS, mark_metrics
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

    def measured(self) -> dict[str, float]:
        """The figures with the loss, where it is finite."""
        return ({} if self.loss is None else {"loss": self.loss}) | dict(self.figures)

    def row(self) -> dict[str, object]:
        """The mark as one row of a table."""
        return {name: getattr(self, name) for name in FIRST} | dict(self.figures)


def read_marks(ladder: LadderRecord) -> list[Mark]:
    """The marks that rungs have reached, by rung and step. Raises DataError for a run that cannot be read."""
    return [mark for rung in ladder.rungs for mark in marks_of(rung, ladder.run_dirs(rung))]


def marks_of(rung: RungRecord, run_dirs: Sequence[Path]) -> list[Mark]:
    """The marks that one rung has reached, each as the first of its runs has it; none where it was not started."""
    runs = [path for path in run_dirs if is_run(path)]
    found = {mark.step: mark for path in reversed(runs) for mark in _reached(rung, path)}
    return [found[step] for step in sorted(found)]


def _reached(rung: RungRecord, run_dir: Path) -> Iterator[Mark]:
    lines: dict[str, dict[int, Mapping[str, Any]]] = {"train": {0: {"tokens": 0}}, "eval": {}}
    wanted = {mark.step for mark in rung.marks}
    for line in read_run(run_dir).lines():
        if line["step"] in wanted and line.get("kind") in lines:
            lines[line["kind"]][line["step"]] = line
    for mark in rung.marks:
        trained, figures = lines["train"].get(mark.step), lines["eval"].get(mark.step)
        if trained is None or figures is None:
            continue
        loss = figures.get("loss")
        yield Mark(
            rung.name, rung.parameters, rung.total_parameters, mark.multiple, mark.phase, mark.step,
            int(trained["tokens"]),
            float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
            _figures(figures),
        )  # fmt: skip


def _figures(evaluated: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in evaluated.items()
        if name not in NOT_FIGURES
        and not name.endswith(_TIMES)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    }


def with_prefix(marks: Sequence[Mark], prefix: str) -> list[Mark]:
    """The marks with those of their other figures alone whose names begin so."""
    return [
        replace(mark, figures={name: value for name, value in mark.figures.items() if name.startswith(prefix)})
        for mark in marks
    ]


def marks_csv(marks: Sequence[Mark]) -> str:
    """The marks as CSV with a line of names; a figure that a mark does not have is empty."""
    others = sorted({name for mark in marks for name in mark.figures})
    text = io.StringIO()
    writer = csv.DictWriter(text, (*FIRST, *others), lineterminator="\n")
    writer.writeheader()
    for mark in marks:
        writer.writerow({name: "" if value is None else value for name, value in mark.row().items()})
    return text.getvalue()


def places(ladder: LadderRecord, everything: bool = False) -> list[dict[str, Any]]:
    """Where each mark is, or will be, as JSON values; with `everything` each other checkpoint that is there, too.

    ``path`` is the checkpoint's, in the first run that has a valid one, ``exists`` says whether any has;
    ``metrics_path`` is None where no run has evaluated it.
    """
    return [place for rung in ladder.rungs for place in _places(rung, ladder.run_dirs(rung), everything)]


def _places(rung: RungRecord, dirs: Sequence[Path], everything: bool) -> Iterator[dict[str, Any]]:
    marks: dict[int, Mapping[str, Any]] = {
        mark.step: {"name": mark_name(mark.multiple, mark.phase), **asdict(mark)} for mark in rung.marks
    }
    for step in {step for path in dirs for step, _ in step_dirs(path / CHECKPOINTS)} if everything else ():
        marks.setdefault(step, {"name": step_name(step), "step": step, "tokens": step * rung.batch_tokens})
    for step in sorted(marks):
        paths = [path / CHECKPOINTS / step_name(step) for path in dirs]
        there = [path for path in paths if path.is_dir() and problem_of(path) is None]
        measured = [path for path in (mark_metrics(run, step) for run in dirs) if path.is_file()]
        path, metrics_path = (there or paths)[0], str(measured[0]) if measured else None
        found = {"path": str(path), "metrics_path": metrics_path, "exists": bool(there)}
        yield {"rung": rung.name, **marks[step], **found}


_NOT_STARTED: Mapping[str, Any] = {"status": "not started", "step": 0, "tokens": None, "seconds": 0}


def statuses(ladder: LadderRecord) -> list[dict[str, Any]]:
    """Each rung as JSON values: the figures of `tuner runs show`, and its marks.

    A rung of which no run is there yet is `not started`. Raises DataError for a run that cannot be read.
    """
    return [_status(ladder, rung) for rung in ladder.rungs]


def _status(ladder: LadderRecord, rung: RungRecord) -> dict[str, Any]:
    path = ladder.run_dir(rung)
    run = summary(read_run(path)) if is_run(path) else _NOT_STARTED
    marks = marks_of(rung, ladder.run_dirs(rung))
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
