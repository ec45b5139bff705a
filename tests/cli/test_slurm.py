"""The shipped SLURM script, run by bash with stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.caches import new_cache
from tests.fixtures import forked, trainings
from tuner.config.shipped import shipped_scripts

SCRIPT = shipped_scripts()["train.sbatch"]
STANDS_IN = """#!/bin/bash
printf '%s' "$(basename "$0")" >> "$CALLS"
printf ' [%s]' "$@" >> "$CALLS"
echo >> "$CALLS"
exit "${CODE_OF_SRUN:-0}"
"""
# Two tasks on one node, as srun starts them; its exit code is the largest of theirs.
SRUN = """#!/bin/bash
shift 2
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=here
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    started+=($!)
done
largest=0
for task in "${started[@]}"; do
    wait "$task"
    code=$?
    [ "$code" -gt "$largest" ] && largest=$code
done
exit "$largest"
"""


def put_on_path(directory: Path, **programs: str) -> None:
    programs["scontrol"] = STANDS_IN.replace("${CODE_OF_SRUN:-0}", "0")
    for name, script in programs.items():
        (directory / name).write_text(script)
        (directory / name).chmod(0o755)


def submit(directory: Path, code: int, *words: str) -> tuple[int, list[str]]:
    """Run the script where `srun` ends with `code`; its own exit code and the commands that it ran."""
    put_on_path(directory, srun=STANDS_IN)
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


@pytest.mark.multi
def test_two_tasks_train_stop_and_have_the_job_requeued(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2)
    calls = tmp_path / "calls"
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TUNER_CACHE": str(new_cache(tmp_path / "cache")),
        "CALLS": str(calls),
        "SLURM_JOB_ID": str(os.getpid()),
    }
    words = ["bash", str(SCRIPT), "r.yaml", "--train.stop_after", "2 steps", "--logging.level", "info"]
    with forked.as_words() as (python, handle):
        put_on_path(tmp_path, srun=SRUN, tuner=f'#!/bin/bash\nexec {shlex.join(python)} -m tuner "$@"\n')
        kept = {"cwd": tmp_path, "env": env, "pass_fds": [handle], "timeout": 300}
        done = subprocess.run(words, check=False, capture_output=True, text=True, **kept)
    assert done.returncode == 75, done.stderr
    assert calls.read_text() == f"scontrol [requeue] [{os.getpid()}]\n"
    run = tmp_path / "runs" / "r"
    assert done.stdout == f"{run}\n"
    assert done.stderr.count("resume with: tuner resume") == 1, "rank 0 speaks for both"
    (launch,) = json.loads((run / "run.json").read_text())["launches"]
    assert (launch["status"], launch["step"], launch["world_size"]) == ("stopped", 2, 2)
    assert all((run / "logs" / f"rank{rank}.log").is_file() for rank in (0, 1))
