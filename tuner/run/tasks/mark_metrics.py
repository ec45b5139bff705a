"""The task that writes what was measured at a mark to a file of its own."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from tuner.run.tasks.trackers.choose import point_of
from tuner.rundir.layout import MARKS, mark_metrics
from tuner.runtime.files import make_dirs, write_json
from tuner.train.progress import Progress
from tuner.train.tasks import Event, Task


class MarkMetricsTask(Task):
    """Keeps the newest step's line, and writes it with the evaluation's where that step is one of `steps`."""

    def __init__(self, run_dir: Path, progress: Progress, steps: Set[int]) -> None:
        self._run, self._progress, self._steps = run_dir, progress, steps
        self._taken: Mapping[str, Any] = {}

    def start(self) -> None:
        """Remove the files of steps that are taken again."""
        for path in (self._run / MARKS).glob(mark_metrics(Path(), "*").name):
            if int(path.stem.removeprefix(mark_metrics(Path(), "").stem)) > self._progress.step:
                path.unlink()

    def notify(self, event: Event) -> None:
        """Take note of a step; write at an evaluation. Raises MachineError."""
        if event.stage == "step":
            self._taken = event.metrics
        elif event.stage == "evaluation" and event.step in self._steps:
            lines = [line for line in (self._taken, event.metrics) if line.get("step") == event.step]
            figures = {name: value for line in lines for name, value in point_of(line).values.items()}
            path = mark_metrics(self._run, event.step)
            make_dirs(path.parent)
            write_json(path, {"step": event.step, "tokens": event.tokens, **figures})
