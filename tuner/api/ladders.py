"""Ladders: one recipe at several sizes, planned, trained, compared at its marks, and continued by a law."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.api.given import RecipeSource, absolute, level_of, loaded_of
from tuner.ladder.fit import Settings
from tuner.ladder.forecast import Forecast, ForecastQuestion, forecast
from tuner.ladder.launch import Benchmark, PlannedRung, RungResult, benchmarked, note_plan, predicted, run_rungs
from tuner.ladder.plan_page import check_output, write_plan
from tuner.ladder.points import Size, points_of
from tuner.ladder.record import LadderRecord, find_rung, places, read_ladders, read_marks, statuses, with_prefix
from tuner.ladder.rungs import Rung, chosen_of, rungs_of


class Ladder:
    """The ladder of a recipe with `ladder.sizes`; a rung is named, or given by its number from 1 as a string.

    ``also`` are directories with other runs of its rungs. Each method raises what its command reports.
    """

    def __init__(self, recipe: RecipeSource, also: Sequence[str | Path] = ()) -> None:
        self.loaded = loaded_of(recipe)
        self.directory, self.also = absolute(self.loaded.recipe.output_dir), [absolute(path) for path in also]

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """The sizes, each with its ordinary recipe, batch, steps and marks; models are built without storage."""
        return rungs_of(self.loaded)

    def plan(
        self, rung: str | None = None, device: str | None = None, quick: bool = False, output: str | Path | None = None
    ) -> list[PlannedRung]:
        """What each rung takes, or one: `tuner ladder plan`; `output` is a page or a PNG to draw."""
        path = None if output is None else absolute(output)
        if path is not None:
            check_output(path)
        planned = [PlannedRung(one) if quick else predicted(one, device) for one in chosen_of(self.rungs, rung)]
        if path is not None:
            write_plan(path, str(self.loaded.recipe.name), planned)
        return planned

    def benchmark(self, rung: str, steps: int = 20, quiet: bool = False) -> Benchmark:
        """Measure some steps of a rung, of which nothing is saved: `tuner ladder benchmark`."""
        return benchmarked(chosen_of(self.rungs, rung)[0], steps, level_of(self.loaded.recipe.logging.level, quiet))

    def run(self, rung: str | None = None, quiet: bool = False) -> list[RungResult]:
        """Train every rung that is not done, or one: `tuner ladder run`."""
        note_plan(self.loaded.recipe, self.rungs)
        return run_rungs(chosen_of(self.rungs, rung), level_of(self.loaded.recipe.logging.level, quiet), lambda _: None)

    def status(self) -> list[dict[str, Any]]:
        """How far each rung is: `tuner ladder status`."""
        return statuses(self._started())

    def checkpoints(self, everything: bool = False) -> list[dict[str, Any]]:
        """Each mark with `path`, `metrics_path` and `exists`: `tuner ladder status --marks`, or `--all`."""
        return places(self._started(), everything)

    def metrics(self, prefix: str = "") -> list[dict[str, Any]]:
        """What was measured at each mark, a row each: `tuner ladder metrics`."""
        return [dict(mark.row()) for mark in with_prefix(read_marks(self._started()), prefix)]

    def fit(
        self, target: str | tuple[float, float] | None = None, loss: str = "loss", scores: Sequence[str] = (),
        chance: float | None = None, level: float = 0.9, samples: int = 1000,
    ) -> Forecast:
        """Fit the law to the marks and predict `target`: `tuner ladder fit`, without its page.

        `target` is a rung, which is left out of the fit where it was trained, or (parameters, tokens).
        """
        ladder = self._started()
        points, rung, size = points_of(read_marks(ladder)), None, None
        if isinstance(target, str):
            planned = ladder.rungs[find_rung([one.name for one in ladder.rungs], target)]
            if any(point.rung == planned.name for point in points):
                rung = planned.name
            else:
                size = Size(planned.parameters, planned.marks[-1].tokens)
        elif target is not None:
            parameters, tokens = target
            size = Size(parameters, tokens)
        question = ForecastQuestion(Settings(level, samples), loss, tuple(scores), chance, rung, size)
        return forecast(points, question)

    def _started(self) -> LadderRecord:
        return read_ladders(self.directory, self.also)
