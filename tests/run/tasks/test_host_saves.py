"""Runs with the optimizer's states on the host: those of runs without, saved from where the states lie, and resumed."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.trainings import launch, outcome
from tests.run.tasks.test_save import BESIDE, saved
from tuner.checkpoint import storage
from tuner.checkpoint.staging import Staged, Staging
from tuner.errors import ExitCode, MemoryLimitError
from tuner.run.tasks.save import Saver, Snapshot
from tuner.runtime.console import Console
from tuner.setup import host_states
from tuner.train.optimizer import OptimizerSet

HOST = {"optimizer__offload": "host"}


@pytest.mark.slow
def test_where_states_lie_may_change_at_a_resume_and_no_bit_does(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, four micro-batches a step, and gradients that are clipped."""
    said: list[str] = []
    monkeypatch.setattr(Console, "warn", lambda console, text: said.append(text))
    length = {"train__duration": "7 steps"}
    plain = outcome(launch(workplace, name="plain", **length).run_dir)
    assert not any("offload" in text for text in said)
    launch(workplace, name="there", train__stop_after="5 steps", **length)
    resumed = launch(workplace, "must", name="there", **length, **HOST)
    assert outcome(resumed.run_dir) == plain
    assert sum("saves nothing on a CPU" in text for text in said) == 1


SHORT = {**HOST, "train__duration": "4 steps", "checkpoint__every": "2 steps", "checkpoint__keep": "9"}


class Late:
    """Saves in the background that begin to read when `may_read` lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.updated, self.copied = threading.Event(), set[str]()
        write, update, copies = storage._write_shard, OptimizerSet.step, Staging._copies

        def late(*args: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.may_read()
            return write(*args)

        def updating(optimizer: OptimizerSet, *args: Any) -> None:
            update(optimizer, *args)
            self.updated.set()

        def noted(staging: Staging, tensors: Mapping[str, torch.Tensor]) -> Staged:
            self.updated.clear()
            self.copied.update(tensors)
            return copies(staging, tensors)

        monkeypatch.setattr(storage, "_write_shard", late)
        monkeypatch.setattr(OptimizerSet, "step", updating)
        monkeypatch.setattr(Staging, "_copies", noted)

    def may_read(self) -> None:
        """After a while: the next update has had its chance."""
        assert not self.updated.wait(0.2), "an update came before the states were written"


def test_states_are_saved_from_where_they_lie_and_the_next_update_waits(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = saved(launch(workplace, name="at-once", **SHORT, checkpoint__async_save="false").run_dir)
    late = Late(monkeypatch)
    beside = launch(workplace, name="beside", **SHORT, checkpoint__async_save="true")
    assert saved(beside.run_dir) == at_once
    assert late.copied and not any(name.startswith("optimizer/") for name in late.copied)
    begin = Saver.begin

    def hasty(saver: Saver, snapshot: Snapshot) -> bool:
        begun = begin(saver, snapshot)
        saver._assembly.train_state.fence.set(None, None)
        return begun

    monkeypatch.setattr(Saver, "begin", hasty)
    monkeypatch.setattr(late, "may_read", late.updated.wait)
    hurried = saved(launch(workplace, name="hasty", **SHORT, checkpoint__async_save="true").run_dir)
    assert {step for step in at_once if hurried[step][0] != at_once[step][0]} == {2}, "without that they differ"


def test_a_save_that_fails_keeps_no_update_waiting(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_write_file", full)
    with pytest.raises(Exception, match="No space left"):
        launch(workplace, **BESIDE, **HOST)


def test_a_host_without_room_ends_the_launch_before_it_begins(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "host_memory", lambda: (1 << 30, 1000))
    with pytest.raises(MemoryLimitError, match=r"optimizer.offload: the states of [\d,]+ parameters take") as raised:
        launch(workplace, **HOST)
    assert raised.value.exit_code is ExitCode.MEMORY and "write offload: none" in str(raised.value.hint)
    assert not (workplace / "runs").exists()
    assert launch(workplace, train__stop_after="1 steps").run_dir
