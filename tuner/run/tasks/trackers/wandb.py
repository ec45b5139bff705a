"""Weights & Biases: one run of the same id over all launches, online or, with WANDB_MODE=offline, in the directory."""

import time
from collections.abc import Collection, Mapping, Sequence

import wandb

from tuner.errors import MachineError
from tuner.run.tasks.trackers.choose import TrackedPoint, TrackedRun

FLUSH_S = 0.2
"""How often wandb's own process writes to its file; it does not outlive this one, and loses what it has not written."""


class Wandb:
    """A tracker whose run has the id of ours."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self.id = known_id or run.facts.run_id
        settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=FLUSH_S)
        opened = wandb.init(
            project=run.logging.project, id=self.id, name=run.name, group=run.logging.group,
            tags=list(run.logging.tags), config=dict(run.facts.recipe), dir=str(run.facts.run_dir), resume="allow",
            settings=settings,
        )
        # wandb's own step counter takes one row a step; a step may have a training line and, later, an evaluation.
        opened.define_metric("step")
        opened.define_metric("*", step_metric="step")
        self._run = opened
        self.place = opened.url or str(run.facts.run_dir / "wandb")

    def held(self) -> Mapping[str, int] | None:
        """The step that the server has of a resumed run; offline nobody can say."""
        newest = None if self._run.offline or not self._run.resumed else self._run.summary.get("step")
        return None if newest is None else {"train": int(newest)}

    def tags(self) -> Collection[str]:
        """Those that the run's page has now, by the server; none offline, where there is no page."""
        return () if self._run.offline else wandb.Api().run(self._run.path).tags

    def send(self, points: Sequence[TrackedPoint]) -> None:
        """Hand the points to wandb's own process, and wait until it has written them down."""
        for point in points:
            self._run.log({"step": point.step, **point.values}, commit=True)
        time.sleep(2 * FLUSH_S)

    def close(self, status: str) -> None:
        """End the launch's part of the run."""
        self._run.finish(exit_code=1 if status == "failed" else 0)


def require_login() -> None:
    """Check without a network that a key is set, where one is needed. Raises MachineError; never asks for one."""
    mode = wandb.setup().settings.mode
    if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        said = "wandb: no API key in the environment"
        raise MachineError(said, hint="set WANDB_API_KEY, or WANDB_MODE=offline to sync later")
