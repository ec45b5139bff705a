"""The shipped SLURM script, run by bash with stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tuner.config.shipped import shipped_scripts

SCRIPT = shipped_scripts()["train.sbatch"]
STANDS_IN = """#!/bin/bash
printf '%s' "$(basename "$0")" >> "$CALLS"
printf ' [%s]' "$@" >> "$CALLS"
echo >> "$CALLS"
exit "${CODE_OF_SRUN:-0}"
"""


def submit(directory: Path, code: int, *words: str) -> tuple[int, list[str]]:
    """Run the script where `srun` ends with `code`; its own exit code and the commands that it ran."""
    for name, script in {"srun": STANDS_IN, "scontrol": STANDS_IN.replace("${CODE_OF_SRUN:-0}", "0")}.items():
        (directory / name).write_text(script)
        (directory / name).chmod(0o755)
    calls = directory / "calls"
    calls.touch()
    env = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "CODE_OF_SRUN": str(code),
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "8",
    }
    done = subprocess.run(["bash", str(SCRIPT), *words], env=env, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1, 3, 5, 7, 75, 130])
def test_only_a_run_that_saved_is_requeued(tmp_path: Path, code: int) -> None:
    returned, calls = submit(tmp_path, code, "my recipe.yaml", "--optimizer.lr", "3e-4")
    train = "[tuner] [train] [my recipe.yaml] [--optimizer.lr] [3e-4] [--resume] [auto]"
    assert returned == code
    assert calls[0] == f"srun [--kill-on-bad-exit=0] [--cpus-per-task=8] {train}"
    assert calls[1:] == (["scontrol [requeue] [4711]"] if code == 75 else [])


def test_the_job_asks_for_its_signal_and_may_be_requeued() -> None:
    lines = SCRIPT.read_text().splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    asked = [line.removeprefix("#SBATCH ") for line in lines[: commands[0]] if line.startswith("#SBATCH ")]
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= set(asked)
    # SLURM reads nothing that comes after the first command.
    assert not any(line.startswith("#SBATCH") for line in lines[commands[0] :])
