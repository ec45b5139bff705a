"""A training on a Ray cluster: as on one machine, to the bit, and its failures named as there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.ray_cluster import ray_workers

WORDS = ("train", "r.yaml", "--parallel.processes", "2", "--name")


def start(work: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tuner", *WORDS, *words]
    return subprocess.Popen(command, cwd=work, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.multi
def test_a_training_on_ray_is_one_on_this_machine(ray_here: Any, tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2, layers=1)
    for name, on in (("local", "here"), ("ray", "ray")):
        process = start(tmp_path, name, "--on", on)
        assert process.communicate()[1].count("ray::") == 0
        assert process.returncode == 0
    assert trainings.outcome(tmp_path / "runs" / "ray") == trainings.outcome(tmp_path / "runs" / "local")
    for name, number, code, said in (
        ("stopped", signal.SIGTERM, 75, ""), ("lost", signal.SIGKILL, 4, " was lost: its Ray worker died"),
    ):  # fmt: skip
        process = start(tmp_path, name, "--on", "ray", "--train.duration", "5000 steps")
        while not (tmp_path / "runs" / name / "metrics.jsonl").is_file():
            time.sleep(0.05)
            assert process.poll() is None
        os.kill(process.pid if number == signal.SIGTERM else ray_workers("RankActor")[0], number)
        assert said in process.communicate()[1]
        assert process.returncode == code
        assert list((tmp_path / "runs" / name / "checkpoints").glob("step-*"))
