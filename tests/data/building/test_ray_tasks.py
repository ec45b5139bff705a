"""Records encoded on Ray: the bytes and errors of local workers, whatever becomes of a worker."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data import tiny
from tests.data.building.worker_jobs import Echo, NeverStarts
from tests.fixtures.ray_cluster import ray_workers
from tuner.data.building import documents, ray_tasks
from tuner.data.building.pool import WINDOW, WorkerDiedError
from tuner.data.building.prepare import prepare
from tuner.errors import DataError, MachineError, RecipeError
from tuner.runtime import ray_cluster


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
def test_the_first_failure_in_order_is_raised(  # noqa: PLR0917
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
