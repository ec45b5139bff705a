"""Real `tuner train` with every tracker that is installed: killed, resumed, and read back with no step twice."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.caches import new_cache
from tests.fixtures import forked, trainings
from tests.run.tasks.trackers.readers import mlflow_points, tensorboard_points, wandb_records

ROOT = Path(__file__).resolve().parents[4]
INSTALLED = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name) is not None]
STEPS = list(range(1, 19))
# Dies in place of step 12 by the signal that nothing can catch, once the trackers have what came before.
KILLED = """
import os, signal, sys, time
import tuner.train.loop as loop
import tuner.run.tasks.trackers.choose as outbox
outbox.INTERVAL_S = 0.01
real = loop.optimizer_step
def dying(state, index, *rest):
    if index == 11:
        time.sleep(1.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(state, index, *rest)
loop.optimizer_step = dying
from tuner.cli.main import main
main(sys.argv[1:])
"""

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="no tracker is installed"), pytest.mark.slow]


def python(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))}
    env = kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    env |= {"TUNER_CACHE": str(new_cache(directory / "cache")), "HOME": str(directory)}
    return forked.run([sys.executable, *words], cwd=directory, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed at step 11, saved at step 8, and resumed to its end, with all trackers on."""
    directory = trainings.prepare(tmp_path_factory.mktemp("tracked"), 1)
    words = ["train", "r.yaml", "--logging.trackers", f"[{', '.join(INSTALLED)}]", "--logging.tags", "[first, second]"]
    words += ["--logging.project", "demo", "--data.eval", "9 documents", "--eval.samples", "0", "--eval.every", "never"]
    words += ["--logging.group", "both", "--train.duration", "18 steps"]
    killed = python(directory, "-c", KILLED, *words)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = directory / "runs" / "r"
    for name in INSTALLED:
        assert state(run, name)["sent"] == {"eval": 0, "train": 11}, name
    resumed = python(directory, "-m", "tuner", "resume", "runs/r")
    assert resumed.returncode == 0, resumed.stderr
    assert "warning" not in resumed.stderr, resumed.stderr
    return run


def state(run: Path, name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((run / "trackers" / f"{name}.json").read_text())
    return read


def losses(run: Path, kind: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in lines if line["kind"] == kind]


def test_each_tracker_has_sent_every_line(run_dir: Path) -> None:
    assert [step for step, _ in losses(run_dir, "train")] == STEPS
    assert [step for step, _ in losses(run_dir, "eval")] == [0, 18]
    for name in INSTALLED:
        assert state(run_dir, name)["sent"] == {"train": 18, "eval": 18}, name


def test_no_secret_is_kept(run_dir: Path) -> None:
    for name in INSTALLED:
        assert set(state(run_dir, name)) == {"schema", "id", "sent"}


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="tensorboard is not installed")
def test_tensorboard_shows_each_step_once(run_dir: Path) -> None:
    points = tensorboard_points(run_dir)
    assert points["train/loss"] == losses(run_dir, "train")
    assert points["eval/loss"] == losses(run_dir, "eval")
    assert {len(points[tag]) for tag in points if tag.startswith("train/")} == {18}


@pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")
def test_wandb_continues_its_run_with_no_step_twice(run_dir: Path) -> None:
    records = [record for _, record in wandb_records(run_dir)]
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    run_id = json.loads((run_dir / "run.json").read_text())["run_id"]
    assert {(run.run_id, run.project, run.run_group, run.display_name, tuple(run.tags)) for run in runs} == {
        (run_id, "demo", "both", "r", ("first", "second"))
    }
    assert len({path for path, _ in wandb_records(run_dir)}) == 2, "one file a launch"
    history = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    found: dict[str, list[tuple[int, float]]] = {"train/loss": [], "eval/loss": []}
    for entry in history:
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in entry.item}
        for name in found.keys() & values.keys():
            found[name].append((values["step"], values[name]))
    assert found["train/loss"] == losses(run_dir, "train")
    assert found["eval/loss"] == losses(run_dir, "eval")


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_its_run_with_no_step_twice(run_dir: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{run_dir.parent}/mlflow.db"
    run_id = state(run_dir, "mlflow")["id"]
    points = mlflow_points(uri, run_id, ["train/loss", "eval/loss"])
    assert points["train/loss"] == losses(run_dir, "train")
    assert points["eval/loss"] == losses(run_dir, "eval")
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "r")
    assert (run.data.tags["tuner.tags"], run.data.tags["tuner.group"]) == ("first, second", "both")
    assert run.data.params["optimizer.lr"] == "0.001"
    experiment = client.get_experiment_by_name("demo")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 1, "one run over both launches"
