"""Which tracker is opened, with what it needs, and what it is sent: every line once and in order, over failures, kills
and resumes. TensorBoard's files are read back with its own reader.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest

from tests.fixtures.tables import cases
from tests.run.tasks.trackers.readers import tensorboard_points
from tuner.config.recipe import LoggingSection, Tracker
from tuner.errors import DataError, MachineError
from tuner.run.tasks.hooks import Hooks, RunFacts
from tuner.run.tasks.trackers import choose
from tuner.run.tasks.trackers.choose import TRACKERS, Memory, Outbox, TrackedPoint, check_trackers, tracker_hooks
from tuner.train.plan import Plan
from tuner.train.progress import Progress
from tuner.train.tasks import Event


class Store:
    """A tracker that keeps what it gets, and fails while `down`."""

    id = "run-1"
    place = "nowhere"

    def __init__(self) -> None:
        self.points: list[tuple[str, int]] = []
        self.down = False
        self.attempts = 0
        self.closed = ""

    def held(self) -> None:
        pass

    def send(self, points: Sequence[TrackedPoint]) -> None:
        self.attempts += 1
        if self.down:
            raise ConnectionError("refused\nby the server")
        self.points += [(point.kind, point.step) for point in points]

    def close(self, status: str) -> None:
        self.closed = status


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "INTERVAL_S", 0.001)
    monkeypatch.setattr(choose, "LONGEST_WAIT_S", 0.002)


def train(*steps: int) -> list[TrackedPoint]:
    return [TrackedPoint("train", step, {"train/loss": 1.0}, 0.0) for step in steps]


def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it never happened")


def test_points_are_numbers_by_name() -> None:
    line = {
        "kind": "eval", "step": 5, "loss": 1.5, "note": "x", "sources": {"a/b": {"loss": 2}, "c": 3.0}, "none": None
    }  # fmt: skip
    point = choose.point_of(line)
    assert (point.kind, point.step) == ("eval", 5)
    assert point.values == {"eval/loss": 1.5, "eval/sources/a/b/loss": 2.0, "eval/sources/c": 3.0}
    assert abs(point.time_s - time.time()) < 60


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert choose.points_of_file(path) == []
    path.write_text('{"kind":"train","step":1,"loss":2.0}\n{"kind":"train","step":2,"lo')
    assert [(point.step, point.values) for point in choose.points_of_file(path)] == [(1, {"train/loss": 2.0})]


def test_every_point_is_sent_once_and_remembered(tmp_path: Path) -> None:
    store, memory = Store(), Memory(tmp_path / "trackers" / "x.json")
    assert memory.read() == (None, {})
    box = Outbox("x", store, memory, {}, pytest.fail)
    assert memory.read() == ("run-1", {}), "the id is kept before anything is sent"
    box.put(train(1, 2))
    until(lambda: memory.read()[1] == {"train": 2})
    box.put([*train(3), TrackedPoint("eval", 3, {}, 0.0)])
    box.close("finished")
    assert store.points == [("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    assert store.closed == "finished"
    assert memory.read() == ("run-1", {"train": 3, "eval": 3})


def test_a_resumed_launch_sends_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    store, memory = Store(), Memory(tmp_path / "trackers" / "x.json")
    first = Outbox("x", store, memory, {}, pytest.fail)
    first.put(train(1, 2, 3, 4, 5))
    first.close("failed")
    # Killed at step 5 or later; metrics.jsonl was cut back to step 3, and 4 to 7 are taken (again).
    second = Outbox("x", store, memory, memory.read()[1], pytest.fail)
    second.put(train(1, 2, 3))
    second.put(train(4, 5, 6, 7))
    second.close("finished")
    assert [step for _, step in store.points] == [1, 2, 3, 4, 5, 6, 7]
    late = Store()
    third = Outbox("y", late, Memory(tmp_path / "trackers" / "y.json"), {}, pytest.fail)
    third.put(train(1, 2, 3))
    third.close("finished")
    assert [step for _, step in late.points] == [1, 2, 3], "a tracker that joins late gets what was before"


def test_a_delivery_that_fails_is_warned_of_once_and_tried_again(tmp_path: Path) -> None:
    store, warnings = Store(), list[str]()
    store.down = True
    box = Outbox("x", store, Memory(tmp_path / "x" / "x.json"), {}, warnings.append)
    box.put(train(1))
    until(lambda: store.attempts > 2)
    box.put(train(2))
    store.down = False
    box.close("finished")
    assert [step for _, step in store.points] == [1, 2]
    assert warnings == ["x: ConnectionError: refused; training continues without it"]


def test_what_could_not_be_sent_is_said_at_the_end(tmp_path: Path) -> None:
    store, warnings = Store(), list[str]()
    store.down = True
    memory = Memory(tmp_path / "x" / "x.json")
    box = Outbox("x", store, memory, {}, warnings.append)
    box.put(train(1, 2))
    box.close("stopped")
    assert warnings[-1] == "x: 2 lines were not sent; metrics.jsonl has them"
    assert memory.read() == ("run-1", {})
    store.down = False
    again = Outbox("x", store, memory, memory.read()[1], warnings.append)
    again.put(train(1, 2))
    again.close("finished")
    assert [step for _, step in store.points] == [1, 2]


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"schema": "other"}')
    with pytest.raises(DataError, match=r"x\.json: not a tracker's state"):
        Memory(tmp_path / "x.json").read()


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
    run = choose.TrackedRun(facts, LoggingSection(project="demo"))
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


def launch(run_dir: Path, from_step: int, warnings: list[str]) -> Hooks:
    pytest.importorskip("tensorboard")
    section = LoggingSection.model_validate({"trackers": ["tensorboard"]})
    facts = RunFacts(run_dir, "abc", 8, {"name": "r"}, from_step)
    hooks = Hooks(tracker_hooks(section, lambda label, text: None, warnings.append), facts, Progress(Plan(8, 1, 8, 8)))
    hooks.notify(Event("start", from_step, 0))
    hooks.raise_error()
    return hooks


def take(hooks: Hooks, metrics: Path, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        line = {"kind": "train", "step": step, "loss": loss, "lr": 0.5}
        hooks.notify(Event("step", step, step, metrics=line))
        with metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    hooks.notify(Event("evaluation", last, last, metrics={"kind": "eval", "step": last, "loss": loss}))


def test_a_resumed_run_shows_each_step_once_with_its_newest_value(tmp_path: Path) -> None:
    metrics, warnings = tmp_path / "metrics.jsonl", list[str]()
    first = launch(tmp_path, 0, warnings)
    take(first, metrics, 1, 5, loss=1.0)
    first.notify(Event("end", 5, 5, status="failed"))
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    second = launch(tmp_path, 3, warnings)
    take(second, metrics, 4, 8, loss=2.0)
    second.notify(Event("end", 8, 8, status="finished"))
    points = tensorboard_points(tmp_path)
    assert points["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), *((step, 2.0) for step in range(4, 9))]
    assert points["eval/loss"] == [(8, 2.0)]
    assert points["train/lr"] == [(step, 0.5) for step in range(1, 9)]
    assert warnings == []


def test_a_run_that_starts_over_shows_nothing_of_before(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    first = launch(tmp_path, 0, [])
    first.notify(Event("evaluation", 0, 0, metrics={"kind": "eval", "step": 0, "loss": 9.0}))
    take(first, metrics, 1, 2, loss=1.0)
    first.notify(Event("end", 2, 2, status="failed"))
    metrics.unlink()
    again = launch(tmp_path, 0, [])
    again.notify(Event("evaluation", 0, 0, metrics={"kind": "eval", "step": 0, "loss": 8.0}))
    take(again, metrics, 1, 3, loss=2.0)
    again.notify(Event("end", 3, 3, status="finished"))
    points = tensorboard_points(tmp_path)
    assert points["train/loss"] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert points["eval/loss"] == [(0, 8.0), (3, 2.0)]
