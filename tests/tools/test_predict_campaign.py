"""Predicted bytes are those that the allocator gives out, which torch's profiler counts without our ledger."""

import time
import weakref
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _collective_utils as of_dtensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.fixtures import predict_counted
from tests.fixtures.predict_cases import QUICK, SLOW, Case, cases, meshes
from tests.fixtures.predict_counted import counted, resolved_case, settle_collectives, settled
from tests.fixtures.predict_traced import predicted
from tools.predict_campaign import problems


@pytest.mark.slow("qwen3")
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=lambda case: case.model
)
def test_prediction_is_what_was_counted(case: Case, tmp_path: Path) -> None:
    setup = resolved_case(case, tmp_path)
    real, said = counted(*setup), predicted(*setup)
    assert problems(real, said) == []
    assert [name for name, _ in said.marks] == [name for name, _ in real.marks]
    assert said.marks[:-1] == real.marks[:-1]  # at the end, what an earlier step left is gone
    assert said.peak == pytest.approx(real.peak, rel=1e-3)
    assert min(real.parameters, real.optimizer, real.gradients, *real.saved) > 0


def test_differences_are_seen(tmp_path: Path) -> None:
    said = predicted(*resolved_case(SLOW[0], tmp_path))
    assert problems(said, said) == []
    for key, value in (("parameters", said.parameters + 4), ("gradients", 0), ("saved", [said.saved[0]])):
        assert len(problems(said, replace(said, **{key: value}))) == 1
    assert problems(said, replace(said, peak=round(said.peak * 1.03)))[0].startswith("peak")
    assert problems(said, replace(said, peak=round(said.peak * 1.01))) == []


def test_there_are_enough_cases() -> None:
    every = cases([f"drawn-{i}" for i in range(10)])
    assert len(every) >= 50 and {case.processes for case in every} == {1, 2, 4}
    grouped = meshes()
    assert len({case.name for case in grouped}) >= 30 and {case.processes for case in grouped} == {2, 4}


@pytest.mark.parametrize("holds_view", [False, True], ids=["its object", "a view of it"])
def test_a_collective_ends_when_threads_have_let_go(holds_view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_counted, "level_now", lambda: 0)  # nothing counts in this process
    threads = []

    def collective(tensor: torch.Tensor) -> None:
        held = [tensor[:1] if holds_view else tensor]

        def let_go() -> None:
            time.sleep(0.1)
            held.clear()

        threads.append(Thread(target=let_go))
        threads[-1].start()

    given = torch.zeros(8)
    storage, gone = StorageWeakRef(given.untyped_storage()), weakref.ref(given)
    settled(collective)(given)
    del given
    assert gone() is None and storage.expired()
    threads[0].join()


def test_collectives_are_settled_wherever_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.scatter
    settle_collectives(monkeypatch.setattr)
    assert dist.scatter is not real and of_dtensor.scatter is dist.scatter  # type: ignore[attr-defined]
    assert dist.distributed_c10d.all_gather is dist.all_gather
