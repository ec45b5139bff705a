"""The learning rate over a run: drawn with characters, and in figures where something begins or ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cli.output import columns
from tuner.config.numbers import Duration
from tuner.config.optimizers import MuonOptimizer
from tuner.config.recipe import Recipe
from tuner.config.schedules import CustomSchedule
from tuner.data.building.prepare import find_prepared
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import RecipeError, TunerError
from tuner.rundir.curves import AXIS_WIDTH, Chart, Curve, Points, draw
from tuner.setup.timetable import run_schedule
from tuner.train.plan import Schedule, batch_sizes, plan_steps

if TYPE_CHECKING:
    import numpy.typing as npt


PARTS = 1000
"""Steps of a run whose length is not known yet: tenths of a percent."""
HINT = "prepare the data first: tuner prepare-data RECIPE; or write train.duration in steps"
ROWS = 13
MOST_POINTS = 400
"""Points of the curve in the `--json` document."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule over `total_steps` steps; where the run's length is not known, over 1000 parts of it."""

    schedule: Schedule
    total_steps: int
    known: bool

    def label(self, index: int) -> str:
        """An index as people read it."""
        return f"{index:,}" if self.known else f"{100 * index / PARTS:g}%"

    def points(self) -> list[tuple[int, str]]:
        """Indices within the run at which something begins or ends, each once, with what."""
        found: dict[int, list[str]] = {0: ["start"], 1: ["first step"]} if self.known else {0: ["start"]}
        for index, what in self.schedule.turns():
            if 0 < index <= self.total_steps:
                found.setdefault(index, []).append(what)
        found.setdefault(self.total_steps, []).append("last step" if self.known else "end")
        return [(index, ", ".join(what)) for index, what in sorted(found.items())]


def planned_schedule(recipe: Recipe) -> tuple[PlannedSchedule, list[str]]:
    """The schedule of a recipe, and warnings.

    A length in steps is exact; one in epochs or tokens is that of the prepared data, and per cent where they are not
    there. Raises RecipeError for a schedule that cannot be placed in a run of unknown length.
    """
    changes = [item.after for item in recipe.train.batch_schedule]
    timed = [recipe.train.duration, *_durations(recipe.schedule), *changes]
    rows, why = np.zeros(0, dtype=np.int64), ""
    if any(duration.unit in {"tokens", "epochs"} for duration in timed):
        prepared, why = _prepared_rows(recipe)
        rows = rows if prepared is None else prepared
    known = not why
    if not known:
        if isinstance(recipe.schedule, CustomSchedule):
            use = recipe.schedule.use
            raise RecipeError(f"schedule.use {use} needs the number of steps, which is not known ({why})", hint=HINT)
        for duration in timed[1:]:
            if duration.unit != "%":
                raise RecipeError(
                    f"schedule: {duration} cannot be drawn over a run whose number of steps is not known ({why})",
                    hint=HINT,
                )
    length = recipe.train.duration if known else Duration.parse(f"{PARTS} steps")
    plan = plan_steps(length, rows, recipe.train.global_batch_size, batch_sizes(recipe.train, rows) if known else None)
    warnings = [] if known else [f"drawn over per cent of the run: its number of steps is not known yet ({why})"]
    return PlannedSchedule(run_schedule(recipe, plan, rows), plan.total_steps, known), warnings


def figures(recipe: Recipe, found: PlannedSchedule) -> dict[str, Any]:
    """The drawing as data: factors at indices, what happens at some, and each group's peak (null where it is auto)."""
    indices = [round(i * found.total_steps / MOST_POINTS) for i in range(MOST_POINTS + 1)]

    def at(i: int) -> dict[str, Any]:
        return {"at": i if found.known else i / PARTS, "factor": found.schedule.factor(i)}

    return {
        "total_steps": found.total_steps if found.known else None,
        "curve": [at(i) for i in dict.fromkeys(indices)],
        "points": [{**at(i), "what": what} for i, what in found.points()],
        "peaks": dict(peaks(recipe)),
    }


def peaks(recipe: Recipe) -> list[tuple[str, float | None]]:
    """The peak learning rate of each group that has one, the main one first; None where it is auto."""
    optimizer = recipe.optimizer
    main = None if optimizer.lr == "auto" else float(optimizer.lr)
    found: list[tuple[str, float | None]] = [("lr", main)]
    if isinstance(optimizer, MuonOptimizer):
        found.append(("adamw_lr", main if optimizer.adamw_lr == "auto" else float(optimizer.adamw_lr)))
    found += [(f"groups.{i}.lr", group.lr) for i, group in enumerate(optimizer.groups) if group.lr is not None]
    found += [(f"rows.{i}.lr", item.lr) for i, item in enumerate(optimizer.rows) if item.lr is not None]
    return found


def drawing(recipe: Recipe, found: PlannedSchedule, width: int) -> str:
    """The curve of the main learning rate (where that is auto, of its share of the peak), and a table of milestones."""
    table = peaks(recipe)
    cells = max(8, width - AXIS_WIDTH)
    label = "learning rate" if table[0][1] else "share of the peak learning rate, which is auto"
    curve = Curve(0, "", _dots(found, table[0][1] or 1.0, 2 * cells))
    drawn = draw(Chart("lr", label, [curve]), width, ROWS)
    lines = ["".join(text for text, _ in spans).rstrip() for spans in drawn[:-1]]
    head = ["step" if found.known else "run", *(name if peak else f"{name} / auto" for name, peak in table), ""]
    rows = [
        [found.label(index), *(f"{found.schedule.factor(index) * (peak or 1):.3g}" for _, peak in table), what]
        for index, what in found.points()
    ]
    below = columns([head, *rows], right=range(len(head) - 1))
    return "\n".join([*lines, *_axis(found, cells, AXIS_WIDTH), "", below])


def _dots(found: PlannedSchedule, peak: float, count: int) -> Points:
    """One value for each column of dots: that of the first milestone in it, else that in its middle."""
    last = found.total_steps
    milestones: dict[int, int] = {}
    for index, _ in found.points():
        milestones.setdefault(round(index / last * (count - 1)), index)
    indices = sorted({milestones.get(x, round(x * last / (count - 1))) for x in range(count)})
    return Points(step=list(map(float, indices)), value=[found.schedule.factor(i) * peak for i in indices])


def _axis(found: PlannedSchedule, cells: int, left: int) -> list[str]:
    """The axis with a mark at each milestone, and under it the labels of those for which there is room."""
    marks, under = ["─"] * cells, [" "] * cells
    for index, _ in found.points():
        column = round(index / found.total_steps * (cells - 1))
        marks[column] = "┴"
        text = found.label(index)
        start = min(max(0, column - len(text) // 2), cells - len(text))
        around = under[max(0, start - 1) : start + len(text) + 1]
        if all(cell == " " for cell in around):
            under[start : start + len(text)] = text
    unit = "step" if found.known else ""
    return [f"{'':{left - 1}}└{''.join(marks)}", f"{unit:>{left - 1}} {''.join(under).rstrip()}"]


def _durations(section: object) -> list[Duration]:
    values = vars(section).values()
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return [item for item in flat if isinstance(item, Duration)]


def _prepared_rows(recipe: Recipe) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Tokens of each prepared row; without them, why not."""
    try:
        request = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
        path = find_prepared(request)
    except TunerError as error:
        return None, error.message
    if path is None:
        return None, "the data is not prepared"
    return open_prepared(path).train.tokens_per_row, ""
