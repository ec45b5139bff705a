"""Start, or resume, what is missing of a ladder's rungs, one after the other; what is done is skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tuner.errors import RecipeError
from tuner.ladder.rungs import Rung
from tuner.run.launch import launch
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import nothing_to_do, status_of
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo


@dataclass(frozen=True)
class RungResult:
    """How a rung's launch ended, or that there was nothing left to do."""

    rung: Rung
    result: RunResult
    was_done: bool

    @property
    def stopped(self) -> bool:
        """Whether it stopped before its end, with a checkpoint to resume from."""
        return self.result.status == "stopped"


def run_rungs(rungs: Sequence[Rung], level: Level, begins: Callable[[Rung], None]) -> list[RungResult]:
    """Train rungs until all are done, or one stops; `begins` is called before each that has something left to do.

    Raises RecipeError for several where a launcher has started this process: a job of theirs is one rung's. Raises
    what a launch raises; the rungs before it stay done, and those after it were not started.
    """
    if RankInfo.is_given() and len(rungs) > 1:
        raise RecipeError(
            "torchrun and srun start the processes of one rung",
            hint="name it: tuner ladder run RECIPE --rung NAME; or submit an array: sbatch --array=1-N train.sbatch",
        )
    done: list[RungResult] = []
    for rung in rungs:
        done.append(_run(rung, level, begins))
        if done[-1].stopped:
            break
    return done


def _run(rung: Rung, level: Level, begins: Callable[[Rung], None]) -> RungResult:
    options = LaunchOptions(resume="auto", level=level)
    status = status_of(rung.loaded, options, Console(False, level), hashes=RankInfo.from_environment().is_main)
    if (finished := nothing_to_do(status, rung.loaded.recipe.export)) is not None:
        return RungResult(rung, finished, was_done=True)
    begins(rung)
    return RungResult(rung, launch(rung.loaded, options, status=status), was_done=False)
