"""Start, or resume, what is missing of a ladder's rungs, one after the other; what is done is skipped."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError, TunerError
from tuner.ladder.record import LadderRecord, as_started, write_ladder
from tuner.ladder.rungs import Rung
from tuner.profile.choose import predict_settled
from tuner.profile.prediction import Prediction
from tuner.run.launch import launch
from tuner.run.measure import target_of
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


A_MACHINE = 8
"""Processes on one machine, where there are more than on one."""


@dataclass(frozen=True)
class PlannedRung:
    """A rung, and what is predicted of it; without a prediction, why not."""

    rung: Rung
    prediction: Prediction | None = None
    why: str | None = None

    @property
    def flops(self) -> float:
        """Operations of the whole run, evaluations left out."""
        return self.rung.step_flops * self.rung.plan.total_steps

    @property
    def warnings(self) -> list[str]:
        """What people should know of the rung before it is trained."""
        found = [self.rung.batch.warning, self.why, *(self.prediction.warnings if self.prediction else ())]
        return [f"{self.rung.name}: {text}" for text in found if text]

    def plain(self) -> dict[str, Any]:
        """The plan as JSON values."""
        rung, found = self.rung, self.prediction
        return {
            "name": rung.name,
            "parameters": rung.parameters,
            "total_parameters": rung.total_parameters,
            "target_tokens": rung.batch.target_tokens,
            "batch_tokens": rung.batch.tokens,
            "batch_rows": rung.batch.tokens // rung.row_tokens,
            "off": round(rung.batch.off, 4),
            "micro_tokens": rung.batch.micro_tokens,
            "processes": rung.batch.processes,
            "accumulation": rung.batch.accumulation,
            "total_steps": rung.plan.total_steps,
            "tokens": rung.tokens,
            "lr": rung.lr,
            "warmup_steps": rung.plan.warmup_steps,
            "marks": [asdict(mark) for mark in rung.marks],
            "flops": self.flops,
            "memory_bytes": found.peak_bytes if found else None,
            "fits": found.verdict if found else None,
            "seconds": found.time.total_s if found else None,
            "run_dir": str(rung.run_dir),
        }


def predicted(rung: Rung, device: str | None) -> PlannedRung:
    """A rung with its predicted memory and time on `device`, by default the one that is here."""
    processes = rung.batch.processes
    spread = f"{processes // A_MACHINE}x{A_MACHINE}" if processes % A_MACHINE == 0 else str(processes)
    try:
        target = target_of(rung.loaded.recipe, device, spread, None)
        return PlannedRung(rung, predict_settled(rung.loaded, target)[1])
    except TunerError as error:
        return PlannedRung(rung, why=f"no prediction: {error.message}")


def note_plan(recipe: Recipe, rungs: Sequence[Rung]) -> None:
    """Write `ladder.json` before rungs are trained, on rank 0. Raises RecipeError where one has another plan there."""
    records = tuple(rung.record for rung in rungs)
    ladder = as_started(LadderRecord(Path(recipe.output_dir), str(recipe.name), records))
    if RankInfo.from_environment().is_main:
        write_ladder(ladder)
