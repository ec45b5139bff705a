"""Start, or resume, what is missing of a ladder's rungs, one after the other; what is done is skipped.

What they will take is predicted, and what a rung's steps take on this machine is measured: its own recipe trained for a
few of them, of which nothing is saved.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError, TunerError
from tuner.ladder.record import LadderRecord, as_started, write_ladder
from tuner.ladder.rungs import Rung
from tuner.profile.choose import predict_settled
from tuner.profile.measure import Measurement, MeasureOptions
from tuner.profile.prediction import Prediction
from tuner.run.launch import launch
from tuner.run.measure import measure_recipe, target_of
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import nothing_to_do, status_of
from tuner.rundir.curves import require_own
from tuner.runtime.console import Console, Level
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import make_dirs, write_atomic


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
            "name": rung.name, "parameters": rung.parameters, "total_parameters": rung.total_parameters,
            "target_tokens": rung.batch.target_tokens, "batch_tokens": rung.batch.tokens,
            "batch_rows": rung.batch.tokens // rung.row_tokens, "off": round(rung.batch.off, 4),
            "micro_tokens": rung.batch.micro_tokens, "processes": rung.batch.processes,
            "accumulation": rung.batch.accumulation, "total_steps": rung.plan.total_steps, "tokens": rung.tokens,
            "lr": rung.lr, "warmup_steps": rung.plan.warmup_steps, "marks": [asdict(mark) for mark in rung.marks],
            "flops": self.flops, "memory_bytes": found.peak_bytes if found else None,
            "fits": found.verdict if found else None, "seconds": found.time.total_s if found else None,
            "run_dir": str(rung.run_dir),
        }  # fmt: skip


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


SCHEMA = "tuner.ladder-benchmark/1"


@dataclass(frozen=True)
class Benchmark:
    """A rung, and what its steps took."""

    rung: Rung
    measured: Measurement

    def plain(self) -> dict[str, Any]:
        """The figures as JSON values: ``step_s`` in seconds, ``tok_per_s``, ``mfu`` (a share), ``memory`` in bytes."""
        sizes = {"rung": self.rung.name, "parameters": self.rung.parameters, "batch_tokens": self.rung.batch.tokens}
        return sizes | self.measured.as_json()


def benchmarked(rung: Rung, steps: int, level: Level) -> Benchmark:
    """Train a rung for `steps` steps as `tuner ladder run` would, and one more before them, without evaluations.

    No run directory is touched. Raises what preparing its data and building its model raise, and MemoryLimitError.
    """
    found = measure_recipe(rung.loaded, MeasureOptions(steps), level).found
    assert found is not None  # it is only where no step is measured
    return Benchmark(rung, found)


def file_name(rung: Rung) -> str:
    """The name of a rung's figures in the ladder's directory."""
    return f"benchmark-{rung.name}.json"


def check_figures(path: Path) -> None:
    """Raise RecipeError where the figures would overwrite something else."""
    require_own(path, SCHEMA.encode(), "a benchmark")


def write_figures(path: Path, found: Benchmark) -> None:
    """Write the figures to a path that `check_figures` looked at. Raises MachineError."""
    make_dirs(path.parent)
    text = json.dumps({"schema": SCHEMA, **found.plain()}, indent=2)  # its mark first, as `check_figures` finds it
    write_atomic(path, f"{text}\n".encode())
