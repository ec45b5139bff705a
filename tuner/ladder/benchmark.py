"""What a rung's steps take on this machine: its own recipe trained for a few of them, of which nothing is saved."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.ladder.rungs import Rung
from tuner.profile.measure import Measurement, MeasureOptions
from tuner.run.measure import measure_recipe
from tuner.rundir.curves import require_own
from tuner.runtime.console import Level
from tuner.runtime.files import make_dirs, write_atomic

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
    assert found is not None  # it is only where no step is taken
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
