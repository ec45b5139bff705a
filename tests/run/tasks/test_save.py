"""Saves beside training are those at once, one at a time; their failures are the run's; nothing ends before them. With
the optimizer's states on the host they are saved from where the states lie.
"""

import errno
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.checkpoint import storage
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import newest, open_checkpoint
from tuner.checkpoint.staging import Staged, Staging
from tuner.errors import DivergedError, ExitCode, MachineError, MemoryLimitError
from tuner.run.tasks import evaluate as evaluate_task
from tuner.run.tasks.save import Saver, Snapshot
from tuner.runtime.console import Console
from tuner.setup import host_states
from tuner.train import loop
from tuner.train.evaluate import Evaluation
from tuner.train.optimizer import OptimizerSet

BESIDE = {"checkpoint__async_save": "true", "checkpoint__keep": "9", "train__duration": "8 steps"}


def saved(run: Path) -> dict[int, tuple[str, dict[str, Any], set[str]]]:
    """Of each checkpoint: the hash of its tensors, its JSON state and its files."""
    found = {}
    for step, path in step_dirs(run / "checkpoints"):
        info = open_checkpoint(path)
        found[step] = (content_sha256(info), info.state, set(info.manifest["files"]))
    return found


class Held:
    """Holds every save in a thread until so many further steps were taken, or somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: float) -> None:
        self.steps_during: list[int] = []
        taken, waited_for, in_flight = 0, False, 0
        real_write, real_step = storage._write_shard, loop.optimizer_step
        real_begin, real_finish = Saver.begin, Saver.wait

        def step(*args: Any) -> Any:
            nonlocal taken
            taken += 1
            return real_step(*args)

        def finish(saver: Saver) -> Any:
            nonlocal waited_for
            waited_for = True
            snapshot = real_finish(saver)
            waited_for = False
            return snapshot

        def begin(saver: Saver, snapshot: Snapshot) -> bool:
            nonlocal taken
            taken = 0
            return real_begin(saver, snapshot)

        def write(*args: Any) -> Any:
            nonlocal in_flight
            if threading.current_thread() is not threading.main_thread():
                in_flight += 1
                assert in_flight == 1
                while taken < steps and not waited_for:
                    time.sleep(0.001)
                self.steps_during.append(taken)
                in_flight -= 1
            return real_write(*args)

        monkeypatch.setattr(loop, "optimizer_step", step)
        monkeypatch.setattr(storage, "_write_shard", write)
        monkeypatch.setattr(Saver, "begin", begin)
        monkeypatch.setattr(Saver, "wait", finish)


def test_what_is_saved_beside_training_is_what_is_saved_at_once(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"data__eval": "7 documents", "eval__every": "4 steps", "eval__samples": "0"}
    flags |= {"checkpoint__keep_best": "eval/loss", "checkpoint__marks": "[7 steps]"}
    at_once = launch(workplace, name="at-once", **{**BESIDE, **flags, "checkpoint__async_save": "false"})
    held = Held(monkeypatch, steps=3)
    beside = launch(workplace, name="beside", **BESIDE, **flags)
    assert held.steps_during[:1] == [3]  # training went on, and changed every tensor
    assert saved(beside.run_dir) == saved(at_once.run_dir)
    assert {"probe.safetensors"} <= saved(beside.run_dir)[7][2]
    assert trainings.outcome(beside.run_dir) == trainings.outcome(at_once.run_dir)


def test_the_next_save_and_a_stop_wait_for_the_one_before(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, steps=math.inf)
    stopped = launch(workplace, train__stop_after="6 steps", **{**BESIDE, "checkpoint__every": "2 steps"})
    assert held.steps_during == [2, 2]
    assert [step for step, _ in step_dirs(stopped.run_dir / "checkpoints")] == [6, 4, 2]
    assert stopped.checkpoint == stopped.run_dir / "checkpoints" / "step-6"


def test_a_run_that_saves_nothing_at_its_end_waits_for_the_last_save(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage._write_shard

    def late(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        return real(*args)

    monkeypatch.setattr(storage, "_write_shard", late)
    done = launch(workplace, **BESIDE | {"train__duration": "5 steps", "checkpoint__at_end": "false"})
    assert done.checkpoint == done.run_dir / "checkpoints" / "step-4"


def test_a_failed_save_ends_the_run_at_the_next_step_with_its_own_error(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = storage.write_all

    def full(descriptor: int, data: bytes) -> None:
        if threading.current_thread() is not threading.main_thread() and newest(run / "checkpoints") is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, data)

    flags = BESIDE | {"checkpoint__every": "2 steps", "train__duration": "6 steps"}
    run = workplace / "runs" / "r"
    monkeypatch.setattr(storage, "write_all", full)
    ended = Saver.ended
    # The thread's end is looked for after every step; here it has always ended by then.
    monkeypatch.setattr(Saver, "ended", property(lambda saver: saver._thread._work is not None or ended.fget(saver)))
    with pytest.raises(MachineError, match=r"rank-0000-of-0001.safetensors: No space left .*needed [\d,]+ bytes"):
        launch(workplace, **flags)
    monkeypatch.undo()
    record = trainings.record(run)
    assert (record["status"], record["launches"][0]["step"]) == ("failed", 5)
    assert [step for step, _ in step_dirs(run / "checkpoints")] == [2]
    assert not list((run / "checkpoints").glob(".tmp-*"))
    whole = launch(workplace, name="whole", train__duration="6 steps", checkpoint__every="never")
    again = launch(workplace, "auto", **flags)
    assert trainings.outcome(again.run_dir) == trainings.outcome(whole.run_dir)


def test_an_error_leaves_the_save_before_it_whole(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Saver.begin

    def begin(saver: Saver, snapshot: Snapshot) -> bool:
        begun = real(saver, snapshot)
        weights = next(iter(saver._assembly.train_state.parameters.values()))
        weights.data.fill_(float("nan"))
        return begun

    monkeypatch.setattr(Saver, "begin", begin)
    with pytest.raises(DivergedError) as raised:
        launch(workplace, **BESIDE)
    assert "step-4" in (raised.value.hint or "")
    monkeypatch.undo()
    assert launch(workplace, "auto", **BESIDE).status == "finished"


def test_a_disk_without_room_is_told_before_the_first_step(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.checkpoint.save.free_bytes", lambda path: 1000)
    with pytest.raises(
        MachineError, match=r"checkpoints: no room for a checkpoint \(needed [\d,]+ bytes, free 1,000 b"
    ):
        launch(workplace)
    run = workplace / "runs" / "r"
    assert not (run / "metrics.jsonl").exists() or not lines(run)


def test_an_evaluation_that_is_not_finite_is_saved_as_none(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_task, "evaluate", lambda *args: Evaluation(math.nan, 5))
    flags = {"data__eval": "7 documents", "eval__samples": "0", "train__duration": "2 steps"}
    done = launch(workplace, checkpoint__keep_best="eval/loss", **flags)
    assert (done.metrics["eval_loss"], done.metrics["best"]) == (None, None)
    assert saved(done.run_dir)[2][1]["eval_loss"] is None
    assert "NaN" not in (done.run_dir / "metrics.jsonl").read_text()
    assert launch(workplace, checkpoint__keep_best="eval/loss", **flags) == done


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
