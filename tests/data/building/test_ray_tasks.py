"""Records encoded on Ray: the bytes and errors of local workers, whatever becomes of a worker."""

from __future__ import annotations

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
from tuner.errors import DataError, MachineError, TunerError
from tuner.runtime import ray_cluster


@pytest.mark.parametrize(("workers", "most"), [(0, 4), (1, 1), (2, 4)], ids=["the cluster's", "fewer", "all"])
def test_answers_come_in_order_and_few_are_taken_ahead(
    workers: int, most: int, fake_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = fake_ray(cpus=2)
    taken, at_once = [], []

    def source() -> Iterator[Any]:
        for number in range(12):
            at_once.append(sum(not ref.done() for ref in refs))
            taken.append(number)
            yield ("sleep", 0.02 * (number % 3 == 0), number)

    refs: list[Any] = []
    submit = ray.threads.submit
    monkeypatch.setattr(ray.threads, "submit", lambda *given: refs.append(submit(*given)) or refs[-1])
    with contextlib.closing(ray_tasks.answers(Echo(), source(), workers)) as found:
        for number in range(12):
            assert next(found)[0][2] == number
            assert len(taken) <= number + 1 + WINDOW * 2
    assert max(at_once) <= most


@pytest.mark.parametrize(
    ("job", "items", "lost", "error", "said"),
    [
        (Echo(), [0, ("sleep", 0.1), ("data error", "third"), ("data error", "fourth")], None, DataError, "third"),
        (Echo(), [0, "lost", ("data error", "third")], "lost", WorkerDiedError, "was lost 21 times"),
        (Echo(), [0, ("odd error", "very")], None, RuntimeError, "OddError: very odd"),
        (NeverStarts(), [1, 2], None, DataError, "cannot start"),
    ],
    ids=["of a record", "lost workers", "cannot be sent", "never starts"],
)
def test_the_first_failure_in_order_is_raised(  # noqa: PLR0917
    job: Any, items: list[Any], lost: Any, error: type[Exception], said: str, fake_ray: Any
) -> None:
    fake_ray(lost=lost)
    with pytest.raises(error, match=said):
        list(ray_tasks.answers(job, items, 2))


@pytest.mark.parametrize(
    ("spoiled", "said", "hint"),
    [
        ({"SAME": ("python", "ours")}, "has tokenizers none for 0", "install the same versions"),
        ({"joined": "ray://there"}, "RAY_ADDRESS=ray://there", "ray job submit"),
    ],
)
def test_what_would_give_other_bytes_or_cannot_work_is_refused(
    spoiled: dict[str, Any], said: str, hint: str, fake_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ray()
    if "joined" in spoiled:
        monkeypatch.setenv("RAY_ADDRESS", spoiled["joined"])
    else:
        versions = iter([{"python": "3", "tokenizers": "0"}, *[{"python": "3", "tokenizers": "none"}] * 9])
        monkeypatch.setattr(ray_tasks, "node_versions", lambda: next(versions))
    with pytest.raises(TunerError, match=said) as raised:
        list(ray_tasks.answers(Echo(), [1], 1))
    assert hint in str(raised.value.hint)


def test_a_machine_that_does_not_see_a_file_is_named(
    fake_ray: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_ray()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    request = tiny.request(tmp_path / "cache", rows, engine="ray")
    monkeypatch.setattr(documents, "blocks", lambda file, real=documents.blocks: _gone(real(file), rows))
    with pytest.raises(DataError, match="No such file") as raised:
        prepare(request)
    assert "must see it under the same path" in str(raised.value.hint)


def _gone(found: Iterator[Any], rows: Path) -> Iterator[Any]:
    listed = list(found)
    rows.unlink()
    yield from listed


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match="ray is missing") as raised, ray_cluster.joined():
        pass
    assert "tuner-lm[ray]" in str(raised.value.hint)


@pytest.mark.slow
@pytest.mark.multi
def test_bytes_are_those_of_local_workers_and_a_killed_one_leaves_no_trace(
    ray_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BUNDLE_BYTES", 1)
    rows = []
    for number in range(24):
        rows.append(tmp_path / f"rows{number:02}.jsonl")
        rows[-1].write_text(f'{{"prompt": "{number} ", "completion": "{"ab" * number + "c"}"}}\n' * 50)
    found = {}
    for engine, workers in (("local", 1), ("ray", 1), ("ray", 2), ("ray", 4)):
        files = [str(path) for path in rows]
        request = tiny.request(tmp_path / f"{engine}{workers}", files, engine=engine, workers=workers)
        stop = threading.Event()
        killer = threading.Thread(target=_kill_some, args=(stop,))
        if workers == 4:
            killer.start()
        path = prepare(request).path
        stop.set()
        found[engine, workers] = {file.name: file.read_bytes() for file in path.iterdir()}
    killer.join()
    assert found["ray", 1] == found["ray", 2] == found["ray", 4] == found["local", 1]
    rows[3].write_text('{"prompt": "a", "completion": "b"}\n{\n')
    said = []
    for engine in ("local", "ray"):
        with pytest.raises(DataError) as raised:
            prepare(tiny.request(tmp_path / "bad", files, engine=engine, workers=2))
        said.append((raised.value.message, raised.value.hint))
    assert said[0] == said[1]
    assert f"{rows[3]}:2:" in said[0][0]


def _kill_some(stop: threading.Event) -> None:
    for _ in range(3):
        if stop.wait(0.2):
            return
        for pid in ray_workers("tuner.prepare")[:1]:
            os.kill(pid, signal.SIGKILL)
