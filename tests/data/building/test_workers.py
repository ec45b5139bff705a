"""Workers: answers in order, failures in order, and no process that outlives its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.building.worker_jobs import Echo, NeverStarts, Unreadable
from tuner.data.building.workers import QUEUED, WorkerDiedError, answers
from tuner.errors import DataError

ROOT = Path(__file__).parents[3]


def gone(pid: int) -> bool:
    """Whether a process ended; a zombie that nobody waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_answers_come_in_order(workers: int) -> None:
    items: list[Any] = [("sleep", 0.05 * (i % 3 == 0)) for i in range(12)]
    found = list(answers(Echo(), items, workers))
    assert [item for item, _, _ in found] == items
    pids = {pid for _, pid, _ in found}
    assert (pids == {os.getpid()}) == (workers == 1)
    if workers > 1:
        assert 1 < len(pids) <= workers
        assert {parallel for _, _, parallel in found} == {"false"}
        wait_until_gone(list(pids))
    assert list(answers(Echo(), [], workers)) == []


def test_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for i in range(40):
            taken.append(i)
            yield i

    with contextlib.closing(answers(Echo(), source(), 2)) as found:
        for i in range(5):
            next(found)
            assert len(taken) <= i + 1 + (QUEUED + 1) * 2


def test_answers_and_items_larger_than_a_socket_holds() -> None:
    items: list[Any] = [("big", 1 << 22), b"y" * (1 << 22)] * 6
    found = list(answers(Echo(), items, 2))
    assert found[::2] == [b"x" * (1 << 22)] * 6
    assert [item for item, _, _ in found[1::2]] == [b"y" * (1 << 22)] * 6


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_failure_in_order_is_raised(workers: int) -> None:
    items: list[Any] = [0, ("sleep", 0.3), ("data error", "third"), ("data error", "fourth"), 4]
    with contextlib.closing(answers(Echo(), items, workers)) as found:
        assert [next(found)[0] for _ in range(2)] == items[:2]
        with pytest.raises(DataError, match="third") as caught:
            next(found)
    assert caught.value.hint == "mend it"


def test_an_error_that_cannot_be_sent_is_named_and_brings_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="OddError: very odd") as caught:
        list(answers(Echo(), [("odd error", "very"), 1], 2))
    assert "in answer" in caught.value.__notes__[0]
    with pytest.raises(DataError, match="cannot start"):
        list(answers(NeverStarts(), [1, 2], 2))


@pytest.mark.parametrize(
    ("item", "how"),
    [
        (("die", signal.SIGKILL), "killed by signal 9"),
        (("exit", 3), "exit code 3"),
        (Unreadable(), "exit code 1"),
    ],
)
def test_a_worker_that_dies_is_an_error_in_its_turn(item: Any, how: str) -> None:
    items: list[Any] = [("sleep", 0.3), item, *range(20)]
    with contextlib.closing(answers(Echo(), items, 2)) as found:
        _, pid, _ = next(found)
        with pytest.raises(WorkerDiedError, match=how):
            next(found)
    wait_until_gone([pid])


def test_all_workers_dead_is_no_hang() -> None:
    with pytest.raises(WorkerDiedError):
        list(answers(Echo(), [("exit", 1)] * 9, 2))


@pytest.mark.parametrize("workers", [1, 2])
def test_orders_are_followed_where_the_answer_was_given(tmp_path: Path, workers: int) -> None:
    items = [("sleep", 0.05 * (i % 3 == 0)) for i in range(9)]
    known: list[int] = []
    path = tmp_path / "orders"
    encoded = answers(Echo(), items, workers, known.append)
    given, order = [], None
    with contextlib.suppress(StopIteration):
        for number in range(10):
            given.append(encoded.send(order))
            order = (path, f"order {number}") if number % 2 == 0 else None
    assert len(given) == 9
    # The generator ended, so all orders were followed, each by who gave the answer.
    assert sorted(known) == [0, 2, 4, 6, 8]
    expected = [f"{i} order {i} {items[i]} {given[i][1]}" for i in known]
    assert sorted(path.read_text().splitlines()) == sorted(expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_order_that_fails_is_raised(tmp_path: Path, workers: int) -> None:
    with contextlib.closing(answers(Echo(), range(9), workers)) as encoded:
        next(encoded)
        with pytest.raises(FileNotFoundError):
            for _ in range(9):
                encoded.send((tmp_path / "no" / "orders", "order"))


@pytest.mark.parametrize("items", [1, 9], ids=["idle", "busy"])
def test_a_worker_that_dies_of_an_order_is_an_error(tmp_path: Path, items: int) -> None:
    with contextlib.closing(answers(Echo(), range(items), 2)) as encoded:
        next(encoded)
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            for _ in range(9):
                encoded.send((tmp_path / "orders", "die"))


def test_a_worker_that_died_before_its_answer_was_settled_is_an_error(tmp_path: Path) -> None:
    with contextlib.closing(answers(Echo(), [("sleep", 0.2), 1], 2)) as encoded:
        _, first, _ = next(encoded)
        _, second, _ = encoded.send((tmp_path / "orders", "order"))
        assert second != first
        os.kill(second, signal.SIGKILL)
        wait_until_gone([second])
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            encoded.send((tmp_path / "orders", "order"))


PARENT = """
import sys
from pathlib import Path
from tests.data.building.worker_jobs import Echo
# No guard for __main__: a worker must not run this file again.
(Path(sys.argv[1]) / "parent").open("a").write("x")
try:
    for answer in answers(Echo(Path(sys.argv[1])), [("sleep", float(sys.argv[2]))] * 100, 2):
        print(answer, flush=True)
finally:
    print("tidied", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("pause", [0.05, 60.0], ids=["between", "within"])
def test_no_worker_outlives_its_parent(tmp_path: Path, number: signal.Signals, pause: float) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(marks), str(pause)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        deadline = time.monotonic() + 60
        while len(list(marks.glob("[0-9]*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.send_signal(number)
        out, err = parent.communicate(timeout=30)
    pids = [int(path.name) for path in marks.glob("[0-9]*")]
    wait_until_gone(pids)
    assert (marks / "parent").read_text() == "x"
    assert (b"tidied" in out) == (number == signal.SIGINT)
    # The workers themselves say nothing.
    assert err.count(b"Traceback") == (number == signal.SIGINT), err
