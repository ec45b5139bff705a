"""A run that ends at a step before its plan does (`train.end_at`), under the schedule of the whole plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.config.recipe import Recipe
from tuner.run.parts.part import LaunchContext, Part, Preflight, TaskNeeds
from tuner.run.status import END_AT
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly
from tuner.train.progress import Progress
from tuner.train.tasks import Task


class EndAt(Part):
    """The step is noted in checkpoints: a launch with a later one continues from there."""

    def __init__(self, recipe: Recipe) -> None:
        self._step = recipe.train.end_at

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """Say where the run ends."""
        total = assembly.timetable.plan.total_steps
        if self._step is not None and self._step < total:
            console.say("ending", f"at step {self._step:,} of {total:,}, under their schedule (train.end_at)")
        return assembly

    def progress_created(self, ready: Preflight, assembly: Assembly, progress: Progress) -> None:
        """Have the run end there."""
        progress.ends_at = self._step

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """None; but the time that is left is that to this step."""
        due = needs.time_left.due
        if self._step is not None:
            needs.time_left.due = replace(due, total_steps=min(due.total_steps, self._step))
        return ()

    def state(self, step: int) -> Mapping[str, Any]:
        """What a later launch holds its own step against."""
        return {END_AT: self._step}
