"""A ladder's file, `ladder.json` in its directory: the rungs as they were planned. Nothing here needs torch.

It holds `schema`, `name` and `rungs`, each with its sizes, batch, rate, steps and marks; each rung's run directory lies
next to it, under the rung's name.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tuner.errors import DataError, RecipeError
from tuner.ladder.rules import PlannedMark
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
    _require_same_plan(before, ladder)
    names = {rung.name for rung in ladder.rungs}
    left = (rung for rung in before.rungs if rung.name not in names and is_run(before.run_dir(rung)))
    return replace(ladder, rungs=(*ladder.rungs, *left))


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


def _require_same_plan(before: LadderRecord, now: LadderRecord) -> None:
    planned = {rung.name: rung for rung in now.rungs}
    for rung in before.rungs:
        if is_run(before.run_dir(rung)) and planned.get(rung.name, rung) != rung:
            raise RecipeError(
                f"{before.run_dir(rung)} was started with another plan ({_difference(rung, planned[rung.name])})",
                hint=f"start another ladder: --name NEW-NAME; or remove that run: tuner runs rm {before.run_dir(rung)}",
            )


def _difference(before: RungRecord, now: RungRecord) -> str:
    old, new = asdict(before), asdict(now)
    shown = [key for key in old if key != "marks" and old[key] != new[key]]
    return ", ".join(f"{key} {_text(old[key])} -> {_text(new[key])}" for key in shown) or "other marks"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if isinstance(value, float) else str(value)
