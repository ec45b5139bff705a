"""`tuner compare`: two models on the same items of tasks, each figure's difference with its interval."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.checkpoint.manifest import step_dirs
from tuner.cli.command import Outcome, command
from tuner.cli.named import run_path
from tuner.cli.output import columns
from tuner.errors import RecipeError
from tuner.rundir.layout import EVALUATIONS
from tuner.rundir.run_json import is_run

if TYPE_CHECKING:
    from tuner.evals.figures import Difference


@command("compare")
def compare(first: str, second: str, level: float = 0.95) -> Outcome:
    """Compare what two models made of the same items, with paired intervals; B better than A is above zero for acc."""
    if not 0 < level < 1:
        raise RecipeError(f"--level {level:g}: is not between 0 and 1", hint="write --level 0.95")
    from tuner.evals import figures as pairs  # which loads numpy

    places = [results_of(run_path(path, others=True)) for path in (first, second)]
    found = pairs.compare(pairs.read_task_results(places[0]), pairs.read_task_results(places[1]), level)
    return Outcome(
        _table(found, level), artifacts={"first": str(places[0]), "second": str(places[1])},
        metrics={f"{one.task}/{one.figure}": _document(one) for one in found} | {"level": level}, is_table=True,
    )


def results_of(path: Path) -> Path:
    """The directory of the results: that of a run's newest step. Raises RecipeError where a run has none."""
    if not is_run(path):
        return path
    newest = next((place for _, place in step_dirs(path / EVALUATIONS)), None)
    if newest is None:
        raise RecipeError(
            f"{path}: no task was scored in this run",
            hint="score some: tuner eval RUN --tasks FILE --output DIR, then: tuner compare DIR OTHER",
        )
    return newest


def _table(found: list[Difference], level: float) -> str:
    lines = [["task", "figure", "A", "B", "B - A", f"{level:.0%} interval", "", "items", "+", "-", "p"]]
    lines += [
        [
            one.task, one.figure, f"{one.first:.4f}", f"{one.second:.4f}", f"{one.difference:+.4f}",
            f"{one.low:+.4f} to {one.high:+.4f}", _WORDS[one.verdict], f"{one.items:,}", f"{one.better:,}",
            f"{one.worse:,}", "-" if one.p is None else f"{one.p:.3g}",
        ]
        for one in found
    ]  # fmt: skip
    return columns(lines, right=(2, 3, 4, 7, 8, 9, 10))


_WORDS = {"better": "B is better", "worse": "A is better", "not shown": "no difference shown"}
_IN_DOCUMENT = ("first", "second", "difference", "low", "high", "verdict", "items", "better", "worse", "p")


def _document(one: Difference) -> dict[str, float | int | str | None]:
    """The figures of a difference; JSON has no infinity and no NaN."""
    figures = {name: getattr(one, name) for name in _IN_DOCUMENT}
    lost = {name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)}
    return figures | dict.fromkeys(lost)
