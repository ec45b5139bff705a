"""What a tracker is sent: every line once and in order, over failures, kills and resumes."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.run.tasks.trackers import choose as module
from tuner.run.tasks.trackers.choose import Memory, Outbox, TrackedPoint, point_of, points_of_file


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
    monkeypatch.setattr(module, "INTERVAL_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.002)


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
    point = point_of(line)
    assert (point.kind, point.step) == ("eval", 5)
    assert point.values == {"eval/loss": 1.5, "eval/sources/a/b/loss": 2.0, "eval/sources/c": 3.0}
    assert abs(point.time_s - time.time()) < 60


def test_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert points_of_file(path) == []
    path.write_text('{"kind":"train","step":1,"loss":2.0}\n{"kind":"train","step":2,"lo')
    assert [(point.step, point.values) for point in points_of_file(path)] == [(1, {"train/loss": 2.0})]


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
