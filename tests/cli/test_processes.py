"""Real `tuner train` in two processes that it starts itself: a rank that fails, and a run that is stopped.

And the shipped SLURM script, run by bash with stand-ins for `srun` and `scontrol`.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import forked, trainings
from tests.fixtures.commands import environment
from tests.fixtures.tables import cases
from tuner.checkpoint.open import newest
from tuner.config.shipped import shipped_scripts

# Imported by every Python of the test: a data error in the seventh step of rank 1.
SPOILED = """
import os
if os.environ.get("RANK") == "1":
    from tuner.data.batches import GlobalBatches
    from tuner.errors import DataError
    real = GlobalBatches.step
    def step(self, i):
        if i == 6:
            raise DataError("row 7 is bad", hint="mend it")
        return real(self, i)
    GlobalBatches.step = step
"""


def start(directory: Path, *words: str, before: str = "") -> subprocess.Popen[str]:
    flags = ["--parallel.processes", "2", "--train.duration", "100000 steps", "--logging.console_every", "0.2 s"]
    return forked.Popen(
        [sys.executable, "-m", "tuner", "train", "r.yaml", "--json", *flags, *words],
        cwd=directory,
        env=environment(directory, PYTHONPATH=f"{before}:{forked.ROOT}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_lines(process: subprocess.Popen[str], metrics: Path, lines: int) -> None:
    while metrics.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def document(process: subprocess.Popen[str], code: int) -> tuple[dict[str, Any], str]:
    """Stdout, which is one document, and stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    parsed: dict[str, Any] = json.loads(out)
    assert parsed["exit_code"] == code
    return parsed, err


@pytest.mark.multi
def test_one_ranks_error_is_the_runs_which_goes_on_until_it_is_told_to_stop(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    (tmp_path / "sitecustomize.py").write_text(SPOILED)
    run, beside = tmp_path / "runs" / "r", ("--checkpoint.async_save", "true")
    failed, err = document(start(tmp_path, *beside, "--checkpoint.every", "2 steps", before=str(tmp_path)), 3)
    told = "rank 1 at step 7, data: row 7 is bad"
    assert failed["error"] == {"type": "DataError", "message": told, "hint": "mend it"}
    assert [line for line in err.splitlines() if "error" in line] == [f"error: {told}"]
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    saved = newest(run / "checkpoints")
    assert saved is not None
    assert saved.step == 6
    assert "saved" in (run / "logs" / "rank0.log").read_text()
    assert "DataError: row 7 is bad" in (run / "logs" / "rank1.log").read_text()

    metrics = run / "metrics.jsonl"
    # As going on cuts it, so that new lines are told from old ones.
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[: saved.step]))
    again = start(tmp_path, "--resume", "auto", "--checkpoint.every", "never", "--logging.level", "info")
    wait_for_lines(again, metrics, saved.step + 2)
    again.send_signal(signal.SIGTERM)
    stopped, err = document(again, 75)
    assert stopped["status"] == "stopped"
    assert stopped["metrics"]["step"] > saved.step
    assert err.count("stopping") == 1
    found = newest(run / "checkpoints")
    assert found is not None
    assert found.step == stopped["metrics"]["step"]
    launches = json.loads((run / "run.json").read_text())["launches"]
    assert [(entry["world_size"], entry["threads"]) for entry in launches] == [(2, 1), (2, 1)]
    assert launches[1]["from_step"] == saved.step
    assert "processes: 2" in (run / "recipe.resolved.yaml").read_text()


@pytest.mark.slow
@pytest.mark.multi
def test_a_branch_in_two_processes_goes_on_from_another_runs_checkpoint(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1)
    document(start(tmp_path, "--train.stop_after", "3 steps"), 75)
    origin = "runs/r/checkpoints/step-3"
    ended, _ = document(start(tmp_path, "--name", "b", "--resume", origin, "--train.stop_after", "2 steps"), 75)
    assert (ended["metrics"]["step"], Path(ended["artifacts"]["checkpoint"]).parents[1].name) == (5, "b")
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [4, 5]


SCRIPT = shipped_scripts()["train.sbatch"]
PROGRAMS: Any = cases(__file__, "programs")


def put_on_path(directory: Path, **programs: str) -> None:
    programs["scontrol"] = PROGRAMS["scontrol"]
    for name, script in programs.items():
        (directory / name).write_text(script)
        (directory / name).chmod(0o755)


def surroundings(directory: Path) -> dict[str, str]:
    (directory / "calls").touch()
    return {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "CALLS": str(directory / "calls"),
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "8",
    }


@pytest.mark.parametrize(("codes", "ends"), cases(__file__, "requeued"))
def test_only_a_run_that_saved_is_requeued_and_a_failed_task_ends_the_others(
    tmp_path: Path, codes: str, ends: int
) -> None:
    put_on_path(tmp_path, srun=PROGRAMS["tasks"], tuner=PROGRAMS["tuner"])
    words = ["my recipe.yaml", "--optimizer.lr", "3e-4"]
    env = surroundings(tmp_path) | {"CODES": codes}
    done = subprocess.run(
        ["bash", str(SCRIPT), *words], cwd=tmp_path, env=env, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (ends, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "srun [--kill-on-bad-exit=1] [--cpus-per-task=8] bash"
    started = [line for line in calls if line.startswith("tuner")]
    assert set(started) == {"tuner [train] [my recipe.yaml] [--optimizer.lr] [3e-4] [--resume] [auto]"}
    assert [line for line in calls if line.startswith("scontrol")] == (
        ["scontrol [requeue] [4711]"] if ends == 75 else []
    )
    assert not list(tmp_path.glob(".tuner-job-*")), "nothing is left for the job's next start"


def test_a_task_of_an_array_trains_its_rung_of_a_ladder(tmp_path: Path) -> None:
    put_on_path(tmp_path, srun=PROGRAMS["tasks"], tuner=PROGRAMS["tuner"])
    env = surroundings(tmp_path) | {"CODES": "75", "SLURM_ARRAY_TASK_ID": "3"}
    done = subprocess.run(["bash", str(SCRIPT), "ladder.yaml", "--seed", "1"], cwd=tmp_path, env=env, check=False)
    assert done.returncode == 75
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1:] == ["tuner [ladder] [run] [ladder.yaml] [--seed] [1] [--rung] [3]", "scontrol [requeue] [4711]"]


def test_the_signal_reaches_the_training_and_not_the_shell_around_it(tmp_path: Path) -> None:
    step = '#!/bin/bash\nshift 2\nsetsid --wait "$@" &\nwait $!\n'
    waits = '#!/bin/bash\ntrap "exit 75" TERM\necho $$ > at\nwhile :; do sleep 0.02; done\n'
    put_on_path(tmp_path, srun=step, tuner=waits)
    job = subprocess.Popen(["bash", str(SCRIPT), "r.yaml"], cwd=tmp_path, env=surroundings(tmp_path))
    at = tmp_path / "at"
    while not (at.is_file() and at.read_text()):
        assert job.poll() is None
        time.sleep(0.01)
    os.killpg(os.getpgid(int(at.read_text())), signal.SIGTERM)  # every process of the step, as SLURM does
    assert job.wait(30) == 75
    assert (tmp_path / "calls").read_text() == "scontrol [requeue] [4711]\n"


def test_the_job_asks_for_its_signal_and_may_be_requeued() -> None:
    lines = SCRIPT.read_text().splitlines()
    commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    asked = [line.removeprefix("#SBATCH ") for line in lines[: commands[0]] if line.startswith("#SBATCH ")]
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= set(asked)
    # SLURM reads nothing that comes after the first command.
    assert not any(line.startswith("#SBATCH") for line in lines[commands[0] :])


@pytest.mark.slow
@pytest.mark.multi
def test_two_tasks_train_stop_and_have_the_job_requeued(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2)
    calls = tmp_path / "calls"
    own = {"GLOO_SOCKET_IFNAME": "lo", "CALLS": str(calls), "SLURM_JOB_ID": str(os.getpid())}
    env = environment(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", **own)
    words = ["bash", str(SCRIPT), "r.yaml", "--train.stop_after", "2 steps", "--logging.level", "info"]
    with forked.as_words() as (python, handle):
        put_on_path(tmp_path, srun=PROGRAMS["srun"], tuner=f'#!/bin/bash\nexec {shlex.join(python)} -m tuner "$@"\n')
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
