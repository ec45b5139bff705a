"""Measures what starting costs: `tuner --help` against a bare five-command Typer app, and a recipe error.

User and system time of the child process, alternating, medians of 11 after one warm-up each; one JSON object on stdout.
Exits 1 when a bound is broken: help at most 1.3x the bare app, a recipe error at most 0.35 s, no torch in either.

    python tools/bench_startup.py
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 11
RATIO, SECONDS = 1.3, 0.35

BARE = '''"""A bare Typer app."""
import typer

app = typer.Typer()


@app.command()
def prepare(recipe: str, verbose: bool = False) -> None:
    """Prepare the data."""


@app.command()
def train(recipe: str, verbose: bool = False) -> None:
    """Train the model."""


@app.command()
def resume(run: str, verbose: bool = False) -> None:
    """Go on with a run."""


@app.command()
def export(run: str, verbose: bool = False) -> None:
    """Export the model."""


@app.command()
def profile(recipe: str, verbose: bool = False) -> None:
    """Measure memory and speed."""


if __name__ == "__main__":
    app()
'''

BROKEN = """model: {name_or_path: owner/name}
data: {train: rows.jsonl}
optimizer: {learning_rate: 3e-4}
train: {duration: 200}
"""

TUNER = "import sys; sys.argv[0] = 'tuner'; from tuner.cli.main import main; main()"
TORCH = (
    "import atexit, os, sys\n"
    "atexit.register(lambda: os.write(2, b'\\ntorch imported' if 'torch' in sys.modules else b''))\n"
)


def cpu_seconds(command: list[str], cwd: Path) -> float:
    """User and system time of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports_torch(words: list[str], cwd: Path) -> bool:
    """Whether a command line loads torch."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TORCH + TUNER, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    return "torch imported" in done.stderr


def measure() -> dict[str, float | bool]:
    """The medians, their ratio, and whether torch was loaded."""
    with tempfile.TemporaryDirectory() as directory:
        cwd = Path(directory)
        (cwd / "bare.py").write_text(BARE)
        (cwd / "broken.yaml").write_text(BROKEN)
        commands = {
            "bare_help_s": [sys.executable, "bare.py", "--help"],
            "tuner_help_s": [sys.executable, "-c", TUNER, "--help"],
            "recipe_error_s": [sys.executable, "-c", TUNER, "train", "broken.yaml"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(ROUNDS + 1):
            for name, command in commands.items():
                spent = cpu_seconds(command, cwd)
                if turn:
                    times[name].append(spent)
        report: dict[str, float | bool] = {name: round(statistics.median(spent), 4) for name, spent in times.items()}
        report["ratio"] = round(report["tuner_help_s"] / report["bare_help_s"], 3)
        report["torch"] = imports_torch(["--help"], cwd) or imports_torch(["train", "broken.yaml"], cwd)
    return report


def main() -> int:
    report = measure()
    ok = report["ratio"] <= RATIO and report["recipe_error_s"] <= SECONDS and not report["torch"]
    print(json.dumps(report | {"ratio_bound": RATIO, "recipe_error_bound_s": SECONDS, "ok": bool(ok)}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
