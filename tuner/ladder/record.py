"""A ladder's file, the rungs as they were planned, and what their runs measured at their marks. Nothing needs torch.

`ladder.json` in its directory holds `schema`, `name` and `rungs`, each with its sizes, batch, rate, steps and marks;
each rung's run directory lies next to it, under the rung's name.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.errors import DataError, RecipeError
from tuner.ladder.rules import Phase, PlannedMark, mark_name
from tuner.rundir.checkpoints import problem_of
from tuner.rundir.layout import CHECKPOINTS, mark_metrics
from tuner.rundir.record import NOT_FIGURES, read_run, summary
from tuner.rundir.run_json import is_run
from tuner.runtime.files import make_dirs, read_json, write_json

LADDER = "ladder.json"
SCHEMA = "tuner.ladder/1"


@dataclass(frozen=True)
class RungRecord:
    """A rung as it was planned."""

    name: str
    parameters: int
    """Without the input embedding."""
    total_parameters: int
    batch_tokens: int
    lr: float | None
    total_steps: int
    marks: tuple[PlannedMark, ...]


@dataclass(frozen=True)
class LadderRecord:
    """A ladder's directory and its planned rungs, in the order of the recipe."""

    directory: Path
    name: str
    rungs: tuple[RungRecord, ...]
    also: tuple[Path, ...] = ()
    """Other directories that hold runs of its rungs."""

    def run_dirs(self, rung: RungRecord) -> tuple[Path, ...]:
        """Where a rung's run may lie, its own place first."""
        return tuple(directory / rung.name for directory in (self.directory, *self.also))

    def run_dir(self, rung: RungRecord) -> Path:
        """The first of these that is a run; its own place where none is there yet."""
        return next(filter(is_run, self.run_dirs(rung)), self.directory / rung.name)


_RUNGS: TypeAdapter[tuple[RungRecord, ...]] = TypeAdapter(tuple[RungRecord, ...])


def read_ladder(directory: Path) -> LadderRecord:
    """Read the ladder of a directory. Raises RecipeError where none was started there, DataError for a damaged file."""
    path = directory / LADDER
    if not path.is_file():
        raise RecipeError(
            f"{directory} holds no ladder: no rung was started there",
            hint="start them: tuner ladder run RECIPE; see what would run: tuner ladder plan RECIPE",
        )
    again = f"have it written again: rm {path} && tuner ladder run RECIPE"
    held = read_json(path)
    if held.get("schema") != SCHEMA:
        raise DataError(f"{path}: not a ladder of this version ({held.get('schema')!r})", hint=again)
    try:
        return LadderRecord(directory, str(held.get("name")), _RUNGS.validate_python(held.get("rungs")))
    except ValidationError as error:
        raise DataError(f"{path}: {error.errors()[0]['msg']}", hint=again) from error


def read_ladders(directory: Path, also: Sequence[Path] = ()) -> LadderRecord:
    """The ladder of a directory, where there is one, with the runs and rungs of others.

    Raises RecipeError where `also` names a directory without a ladder, or a rung has another plan there.
    """
    is_alone = not also or (directory / LADDER).is_file()
    found = read_ladder(directory) if is_alone else LadderRecord(directory, read_ladder(also[0]).name, ())
    rungs = {rung.name: rung for rung in found.rungs}
    for other in also:
        for rung in read_ladder(other).rungs:
            if rungs.setdefault(rung.name, rung) != rung:
                words = _difference(rungs[rung.name], rung)
                raise RecipeError(f"--also {other}: its {rung.name} has another plan ({words})")
    return replace(found, rungs=tuple(rungs.values()), also=tuple(also))


def as_started(ladder: LadderRecord) -> LadderRecord:
    """A ladder as it is planned, with the rungs that were started before and are no longer in its recipe.

    Raises RecipeError where a rung was started with another plan.
    """
    if not (ladder.directory / LADDER).is_file():
        return ladder
    before = read_ladder(ladder.directory)
    planned = {rung.name: rung for rung in ladder.rungs}
    for rung in before.rungs:
        if is_run(before.run_dir(rung)) and (now := planned.setdefault(rung.name, rung)) != rung:
            raise RecipeError(
                f"{before.run_dir(rung)} was started with another plan ({_difference(rung, now)})",
                hint=f"start another ladder: --name NEW-NAME; or remove that run: tuner runs rm {before.run_dir(rung)}",
            )
    return replace(ladder, rungs=tuple(planned.values()))


def write_ladder(ladder: LadderRecord) -> None:
    """Write a ladder's file, whole or not at all. Raises MachineError."""
    make_dirs(ladder.directory)
    rungs = [asdict(rung) for rung in ladder.rungs]
    write_json(ladder.directory / LADDER, {"schema": SCHEMA, "name": ladder.name, "rungs": rungs})


def find_rung(names: Sequence[str], wanted: str) -> int:
    """The place of a rung by its name, or by its number from 1, as a job array has it. Raises RecipeError."""
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and 1 <= int(wanted) <= len(names):
        return int(wanted) - 1
    raise RecipeError(f"{wanted}: no such rung", hint=f"there are: {', '.join(names)}")


def _difference(before: RungRecord, now: RungRecord) -> str:
    old, new = asdict(before), asdict(now)
    shown = [key for key in old if key != "marks" and old[key] != new[key]]
    return ", ".join(f"{key} {_text(old[key])} -> {_text(new[key])}" for key in shown) or "other marks"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)


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
            int(trained["tokens"]), float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
            _figures(figures),
        )  # fmt: skip


def _figures(evaluated: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in evaluated.items()
        if name not in NOT_FIGURES and not name.endswith(_TIMES)
        and isinstance(value, (int, float)) and not isinstance(value, bool)
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
        **run, "name": rung.name, "path": str(path), "parameters": rung.parameters, "total_steps": rung.total_steps,
        "marks": len(rung.marks), "marks_reached": len(marks), "newest_mark": marks[-1].row() if marks else None,
    }
