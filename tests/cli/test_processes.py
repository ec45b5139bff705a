"""Real `tuner train` in two processes that it starts itself: a rank that fails, and a run that is stopped."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import forked, trainings
from tests.fixtures.commands import environment
from tuner.checkpoint.open import newest

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
