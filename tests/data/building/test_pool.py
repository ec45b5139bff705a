"""The pool of worker processes, and the workers on other machines that answer as it does."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny
from tests.data.building.worker_jobs import Echo, NeverStarts, Unreadable
from tests.fixtures.processes import children, gone, parent_of, wait_until_gone
from tests.fixtures.ray_cluster import ray_workers
from tuner.config.methods import SftMethod
from tuner.data.building import documents, ray_tasks
from tuner.data.building.encoded import EncodeJob
from tuner.data.building.pool import WINDOW, WorkerDiedError, WorkerPool, answers
from tuner.data.building.prepare import prepare
from tuner.errors import DataError, MachineError, RecipeError
from tuner.runtime import ray_cluster


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
            assert len(taken) <= i + 1 + WINDOW * 2


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
    with pytest.raises(TypeError, match="listdir"):
        list(answers(Echo(), [1, Unreadable(), 2], 2))


@pytest.mark.parametrize(
    ("item", "how"), [(("die", signal.SIGKILL), "killed by signal 9"), (("exit", 3), "exit code 3")]
)
def test_a_worker_that_dies_is_an_error_in_its_turn(item: Any, how: str) -> None:
    items: list[Any] = [("sleep", 0.3), item, *range(20)]
    with contextlib.closing(answers(Echo(), items, 2)) as found:
        _, pid, _ = next(found)
        with pytest.raises(WorkerDiedError, match=how):
            next(found)
    wait_until_gone([pid])


def test_a_worker_that_dies_while_it_answers_is_no_hang() -> None:
    items: list[Any] = [0, 1, ("big", 1 << 26, 0.2), ("big", 1 << 26, 0.2)]
    with contextlib.closing(answers(Echo(), items, 2)) as found:
        pids = [next(found)[1] for _ in range(2)]
        time.sleep(0.6)  # both are in the middle of an answer that nobody reads, and no socket holds
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            next(found)


def of(pool: WorkerPool[Any, Any], count: int) -> list[int]:
    """The processes of a pool, once they are there."""
    return [pid for _, pid, _ in pool.answers([("sleep", 0)] * count)]


def test_processes_end_with_their_pool() -> None:
    with WorkerPool(Echo(), 3) as pool:
        pids = of(pool, 3)
        (first,) = {parent_of(Path(f"/proc/{pid}")) for pid in pids}
        assert parent_of(Path(f"/proc/{first}")) == os.getpid()
        assert len(set(pids)) == 3
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            list(pool.answers([("sleep", 0.2)] * 9))
        assert not gone(pids[0])
    wait_until_gone([first, *pids])


def test_a_pool_whose_first_process_is_killed() -> None:
    with WorkerPool(Echo(), 2) as pool:
        pids = of(pool, 2)
        first = parent_of(Path(f"/proc/{pids[0]}"))
        os.kill(first, signal.SIGKILL)
        wait_until_gone([first])
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="killed by signal 9"):
            of(pool, 4)
    wait_until_gone(pids)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_pool_that_is_not_needed(at_once: bool) -> None:
    before = children(os.getpid())
    pool = WorkerPool(Echo(), 2)
    (first,) = children(os.getpid()) - before
    pool.end(at_once)
    pool.end(at_once=True)
    assert first not in children(os.getpid())


def test_nothing_that_encodes_starts_a_thread_before_the_workers_are_forked() -> None:
    before = children(os.getpid())
    job = EncodeJob(tiny.tokenizer(), SftMethod().examples, "refuse", stop_at_bad_row=True, much=True)
    with WorkerPool(job, 2) as pool:
        list(pool.answers([(), ()]))
        (first,) = children(os.getpid()) - before
        assert len(os.listdir(f"/proc/{first}/task")) == 1 and len(children(first)) == 2


PARENT = """
import sys
from pathlib import Path
from tests.data.building.worker_jobs import Echo
from tuner.data.building.pool import answers
# No guard for __main__: a worker must not run this file again.
(Path(sys.argv[1]) / "parent").open("a").write("x")
try:
    for answer in answers(Echo(Path(sys.argv[1])), [("sleep", float(sys.argv[2]))] * 100, 2):
        print(answer, flush=True)
finally:
    print("tidied", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "pause"),
    [
        (signal.SIGKILL, 0.05), (signal.SIGKILL, 60.0), (signal.SIGTERM, 60.0), (signal.SIGINT, 60.0),
        pytest.param(signal.SIGTERM, 0.05, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 0.05, marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_its_parent(tmp_path: Path, number: signal.Signals, pause: float) -> None:
    script = tmp_path / "script.py"
    script.write_text(PARENT)
    marks = tmp_path / "marks"
    marks.mkdir()
    command = [sys.executable, str(script), str(marks), str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
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


@pytest.mark.parametrize(("workers", "most"), [(0, 4), (1, 1), (2, 4)])
def test_answers_come_in_order_and_few_are_taken_ahead(
    workers: int, most: int, fake_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, refs, at_once = fake_ray(cpus=2), [], []
    submit = ray.threads.submit
    monkeypatch.setattr(ray.threads, "submit", lambda *given: refs.append(submit(*given)) or refs[-1])

    def source() -> Iterator[Any]:
        for number in range(12):
            at_once.append(sum(not ref.done() for ref in refs))
            yield ("sleep", 0.02 * (number % 3 == 0), number)

    with contextlib.closing(ray_tasks.answers(Echo(), source(), workers)) as found:
        for number in range(12):
            assert next(found)[0][2] == number
            assert len(at_once) <= number + 1 + WINDOW * 2
    assert max(at_once) <= most


THIRD = ("data error", "third")


@pytest.mark.parametrize(
    ("job", "items", "lost", "error", "said", "hint"),
    [
        (Echo(), [0, ("sleep", 0.1), THIRD, ("data error", "fourth")], None, DataError, "third", "mend it"),
        (Echo(), [0, "lost", THIRD], "lost", WorkerDiedError, "was lost 21 times", ""),
        (Echo(), [0, ("odd error", "very")], None, RuntimeError, "OddError: very odd", ""),
        (NeverStarts(), [1, 2], None, DataError, "cannot start", ""),
        (Echo(), [("unseen", "No such file")], None, DataError, "No such file", "must see it under the same path"),
    ],
)
def test_the_first_failure_on_other_machines_is_raised(  # noqa: PLR0917
    job: Any, items: list[Any], lost: Any, error: type[Exception], said: str, hint: str, fake_ray: Any
) -> None:
    fake_ray(lost=lost)
    with pytest.raises(error, match=said) as raised:
        list(ray_tasks.answers(job, items, 2))
    assert hint in (getattr(raised.value, "hint", "") or "")


@pytest.mark.parametrize(
    ("address", "error", "said", "hint"),
    [("", MachineError, "ray is missing", "pip install ray"), ("ray://a", RecipeError, "ray://a", "ray job submit")],
)
def test_what_cannot_work_is_refused(  # noqa: PLR0917
    address: str, error: type[MachineError], said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(error, match=said) as raised, ray_cluster.joined():
        pass
    assert hint in str(raised.value.hint)


@pytest.mark.slow("ray_here")
@pytest.mark.parametrize("where", ["fake_ray", "ray_here"])
def test_bytes_are_those_of_local_workers_and_killed_ones_leave_no_trace(
    where: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = request.getfixturevalue(where)
    if where == "fake_ray":
        ray()
    monkeypatch.setattr(documents, "BUNDLE_BYTES", 1)
    rows = [tmp_path / f"rows{number:02}.jsonl" for number in range(24)]
    for number, path in enumerate(rows):
        path.write_text(f'{{"prompt": "{number} ", "completion": "{"ab" * number + "c"}"}}\n' * 50)

    def build(engine: str, workers: int, place: str) -> dict[str, bytes]:
        files = [str(path) for path in rows]
        path = prepare(tiny.request(tmp_path / place, files, engine=engine, workers=workers)).path
        return {file.name: file.read_bytes() for file in path.iterdir()}

    expected = build("local", 1, "local")
    killer = threading.Thread(target=kill_some, args=(ended := threading.Event(),))
    for workers in (1, 2, 4):
        if workers == 4:
            killer.start()
        assert build("ray", workers, f"ray{workers}") == expected
    ended.set()
    killer.join()
    rows[3].write_text('{"prompt": "a", "completion": "b"}\n{\n')
    for engine in ("local", "ray"):
        with pytest.raises(DataError, match=f"{rows[3]}:2:2: ") as raised:
            build(engine, 2, "bad")
        assert raised.value.exit_code == 3


def kill_some(ended: threading.Event) -> None:
    """Kill a worker now and then."""
    while not ended.wait(0.2):
        for pid in ray_workers("tuner.prepare")[:1]:
            os.kill(pid, signal.SIGKILL)
            ended.wait(3)
