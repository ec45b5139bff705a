"""Which tracker is opened, with what it needs, and what it is sent when a run goes on."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest

from tests.fixtures.tables import cases
from tuner.config.recipe import LoggingSection, Tracker
from tuner.errors import MachineError
from tuner.run.tasks.hooks import Hooks, RunFacts
from tuner.run.tasks.trackers import choose
from tuner.run.tasks.trackers.choose import TRACKERS, TrackedPoint, TrackedRun, check_trackers, tracker_hooks
from tuner.train.plan import Plan
from tuner.train.progress import Progress
from tuner.train.tasks import Event


class Server:
    """A tracker that outlives launches and knows what it has, as W&B's server and MLflow's do."""

    id = "s-1"
    place = "https://server"

    def __init__(self, held: dict[str, int] | None) -> None:
        self._held = held
        self.got: list[tuple[str, int]] = []

    def held(self) -> Mapping[str, int] | None:
        return self._held

    def send(self, points: Sequence[TrackedPoint]) -> None:
        self.got += [(point.kind, point.step) for point in points]

    def close(self, status: str) -> None:
        pass


@pytest.mark.parametrize(("held", "expected"), cases(__file__, "a_run_goes_on_from_what_the_tracker_has"))
def test_a_run_goes_on_from_what_the_tracker_has(
    held: dict[str, int] | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remembered: evaluation 0 and steps to 4 were sent; metrics.jsonl was cut back to step 3; 4 to 6 are taken."""
    server = Server(held)
    monkeypatch.setitem(TRACKERS, "mlflow", choose.Known(lambda run, known_id: server))
    (tmp_path / "trackers").mkdir()
    state = {"schema": "tuner.tracker/1", "id": "s-1", "sent": {"train": 4, "eval": 0}}
    (tmp_path / "trackers" / "mlflow.json").write_text(json.dumps(state))
    lines = [{"kind": "eval", "step": 0, "loss": 1.0}]
    lines += [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said: list[tuple[str, str]] = []
    section = LoggingSection.model_validate({"trackers": ["mlflow", "mlflow"]})
    registered = tracker_hooks(section, lambda label, text: said.append((label, text)), pytest.fail)
    assert len(registered) == 1
    hooks = Hooks(registered, RunFacts(tmp_path, "abc", 6, {"name": "r"}, 3), Progress(Plan(6, 1, 6, 6)))
    hooks.notify(Event("start", 3, 0))
    for step in (4, 5, 6):
        hooks.notify(Event("step", step, 0, metrics={"kind": "train", "step": step, "loss": 1.0}))
    hooks.notify(Event("end", 6, 0, status="finished"))
    hooks.raise_error()
    assert [step for _, step in server.got] == expected
    assert said == [("tracker", "mlflow: https://server")]


def test_a_directory_of_that_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notalibrary").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_spec("notalibrary") is not None
    monkeypatch.setitem(TRACKERS, "wandb", replace(TRACKERS["wandb"], modules=("notalibrary",)))
    with pytest.raises(MachineError, match="wandb needs the library notalibrary") as caught:
        check_trackers(["wandb"])
    assert caught.value.hint == "install it: pip install wandb"


def test_a_tag_set_on_the_page_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wandb's library stood in for: what was on the page before does not count, nor other tags."""
    page = ["Cancel", "mine"]
    asked: list[str] = []

    class Api:
        def run(self, path: str) -> SimpleNamespace:
            asked.append(path)
            return SimpleNamespace(tags=list(page))

    opened = SimpleNamespace(
        offline=False, resumed=False, path="me/tuner/abc", url="https://page",
        define_metric=lambda *_, **__: None, log=lambda *_, **__: None, finish=lambda **_: None,
    )  # fmt: skip
    fake = ModuleType("wandb")
    vars(fake).update(Api=Api, init=lambda **_: opened, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delitem(sys.modules, "tuner.run.tasks.trackers.wandb", raising=False)
    monkeypatch.setattr(choose, "INTERVAL_S", 0.001)
    logging = {"trackers": ["wandb"], "cancel_tags": ["cancel", "STOP-it"], "cancel_every": "0.002 s"}
    said: list[str] = []
    section = LoggingSection.model_validate(logging)
    registered = tracker_hooks(section, lambda label, text: said.append(f"{label} {text}"), pytest.fail)
    hooks = Hooks(registered, RunFacts(tmp_path, "abc", 6, {"name": "r"}, 0), Progress(Plan(6, 1, 6, 6)))
    hooks.notify(Event("start", 0, 0))
    for tags, stops in (([], False), (["other"], False), (["stop-IT"], True)):
        page[:] = [*page[1:], *tags] if stops else [*page, *tags]
        before = len(asked)
        while len(asked) < before + 3:
            time.sleep(0.001)
        assert (tmp_path / "STOP").exists() is stops
    hooks.notify(Event("end", 6, 0, status="stopped"))
    monkeypatch.delitem(sys.modules, "tuner.run.tasks.trackers.wandb", raising=False)
    assert set(asked) == {"me/tuner/abc"}
    assert said[1:] == ["stopping the run's page has a new tag, stop-it"]


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_without_a_key_is_refused_and_never_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()
    with pytest.raises(MachineError, match="no API key"):
        check_trackers(["wandb"])
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers(["wandb"])
    wandb.teardown()


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_the_environments_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    facts = RunFacts(tmp_path / "run", "abc", 2, {"name": "r", "seed": 1}, 0)
    run = TrackedRun(facts, LoggingSection(project="demo"))
    tracker = TRACKERS["mlflow"].open(run, None)
    assert tracker.held() == {}
    tracker.send([TrackedPoint("train", step, {"train/tokens": step * 10.0}, 0.0) for step in (1, 2)])
    again = TRACKERS["mlflow"].open(run, tracker.id)
    assert (again.id, again.held()) == (tracker.id, {"train": 2})
    again.close("stopped")
    assert list((tmp_path / "store").rglob("metrics/train/tokens"))
    assert not (tmp_path / "mlflow.db").exists()


def test_every_tracker_that_a_recipe_may_name_can_be_opened() -> None:
    assert set(get_args(Tracker)) == set(TRACKERS)
