"""Weights & Biases: one run of the same id over all launches, online or, with WANDB_MODE=offline, in the directory."""

from collections.abc import Sequence

import wandb

from tuner.errors import MachineError
from tuner.train.trackers.tracker import Point, TrackedRun


class Wandb:
    """A tracker whose run has the id of ours."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self.id = known_id or run.run_id
        settings = wandb.Settings(silent=True, console="off")
        try:
            opened = wandb.init(
                project=run.project,
                id=self.id,
                name=run.name,
                tags=list(run.tags),
                config=dict(run.recipe),
                dir=str(run.run_dir),
                resume="allow",
                settings=settings,
            )
        except wandb.Error as error:
            raise MachineError(f"wandb: {error}", hint="see the message; WANDB_MODE=offline needs no server") from error
        self._run = opened
        self.place = opened.url or str(run.run_dir / "wandb")

    def send(self, points: Sequence[Point]) -> None:
        """Hand the points to wandb's own process, which outlives this one."""
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self, status: str) -> None:
        """End the launch's part of the run."""
        self._run.finish(exit_code=1 if status == "failed" else 0)


def require_login() -> None:
    """Check without a network that a key is at hand, where one is needed. Raises MachineError; never asks for one."""
    mode = wandb.setup().settings.mode
    if mode in ("online", "shared") and not wandb.login(prompt=False, verify=False):
        raise MachineError(
            "wandb: no API key in the environment", hint="set WANDB_API_KEY, or WANDB_MODE=offline to sync later"
        )
