"""A save and the pruning behind it, struck at every one of their system calls."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.states import full_state
from tests.faults.bench import scratch
from tests.faults.calls import SPACE, Call
from tests.faults.disk import MODES, Disk, lay_out
from tests.faults.evidence import label
from tests.faults.supervisor import Fault, Trace, supervise
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import newest, open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import MachineError
from tuner.rundir.checkpoints import prune
from tuner.runtime.files import sweep


class Saves:
    """A directory with step 1, in which step 2 is saved and step 1 pruned."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.start = directory / "start"
        run = CheckpointDir(self.start, "r0")
        self.first = content_sha256(open_checkpoint(save(run, 1, full_state(1), {"step": 1}, {})))
        self.restore()
        self.trace = self.run(None)
        self.second = content_sha256(open_checkpoint(self.root / "step-2"))
        self.calls = self.trace.calls

    def restore(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.start, self.root)

    def work(self) -> int:
        sweep(self.root)
        try:
            save(CheckpointDir(self.root, "r1"), 2, full_state(2), {"step": 2}, {})
            prune(self.root, 1)
        except MachineError as error:
            print(error.message)
            return 4
        return 0

    def run(self, fault: Fault | None) -> Trace:
        return supervise(self.work, self.root, fault, record=fault is None)

    def judge(self, committed: bool) -> str:
        """The hash of what is newest; fails on what looks whole and is not, and on a step that is lost."""
        info = newest(self.root, pytest.fail)
        assert info is not None
        for _, path in step_dirs(self.root):
            open_checkpoint(path)
        found = content_sha256(info)
        assert found in ({self.second} if committed else {self.first, self.second})
        return found

    def finish(self) -> None:
        """Save again; the end is as if nothing had happened."""
        trace = self.run(None)
        assert trace.code == 0, trace.output
        sweep(self.root)
        assert os.listdir(self.root) == ["step-2"]
        assert self.judge(True) == self.second

    @property
    def commit(self) -> int:
        """The call, from 1, by which step 2 gets its name."""
        return next(n for n, call in enumerate(self.calls, 1) if call.other == str(self.root / "step-2"))


@pytest.fixture(scope="module")
def saves() -> Iterator[Saves]:
    with scratch() as directory:
        yield Saves(directory)


HALVES = [0, pytest.param(1, marks=pytest.mark.slow)]
"""The calls with odd numbers, and those with even ones, which resemble them."""


def half(saves: Saves, which: int) -> Iterator[tuple[int, int, Call]]:
    """How many there were before, the number from 1 of every other call, and the call."""
    for number, at in enumerate(range(1 + which, len(saves.calls) + 1, 2)):
        yield number, at, saves.calls[at - 1]


@pytest.mark.parametrize("which", HALVES)
def test_killed_at_every_call_and_again_in_the_recovery(saves: Saves, which: int) -> None:
    seen = set()
    for number, at, call in half(saves, which):
        for kind in ("kill", "tear") if call.kind == "write" else ("kill",):
            saves.restore()
            assert saves.run(Fault(at, kind)).struck_at == at
            seen.add(saves.judge(at > saves.commit))
            if number % 3 == 0:
                saves.run(Fault(1 + at // 3, "kill"))
                saves.judge(at > saves.commit)
            if number % 4 == 0:
                saves.finish()
    assert seen == {saves.first, saves.second}
    assert len(saves.calls) > 35


@pytest.mark.parametrize("which", HALVES)
def test_an_error_at_every_call(saves: Saves, which: int) -> None:
    told = 0
    for number, at, call in half(saves, which):
        for kind, words in (("full", "No space left on device"), ("error", "Input/output error")):
            if kind == "full" and not (call.kind in SPACE or call.creates):
                continue  # it would strike at the next call that needs room
            saves.restore()
            trace = saves.run(Fault(at, kind))  # type: ignore[arg-type]
            where = f"{kind} at {at}: {label(call, saves.root)}"
            if trace.code:
                told += 1
                assert trace.code == 4, (where, trace.output)
                assert words in trace.output and str(saves.root) in trace.output, (where, trace.output)
                if kind == "full" and call.kind == "write":
                    assert "needed" in trace.output, (where, trace.output)
            elif trace.struck:
                assert call.kind in ("mkdir", "unlink", "close"), f"{where} went unnoticed"
            saves.judge(trace.code == 0)
            if number % 8 == 0:
                saves.finish()
    assert told > 20


def test_short_writes_are_completed(saves: Saves) -> None:
    for at, call in enumerate(saves.calls, 1):
        if call.kind == "write" and call.size > 1:
            saves.restore()
            assert saves.run(Fault(at, "short")).code == 0
            assert saves.judge(True) == saves.second


def test_power_is_lost_after_every_call(saves: Saves) -> None:
    """In any state of the disk nothing half-made looks whole, and what was committed and flushed is there."""
    flushed = next(n for n, call in enumerate(saves.calls) if n >= saves.commit and call.path == str(saves.root))
    disk = Disk(saves.start, saves.root)
    rng = random.Random(0)
    states = 0
    for at, call in enumerate(saves.calls):
        disk.apply([call])
        for mode in MODES:
            shutil.rmtree(saves.root)
            lay_out(disk.image(mode, rng), saves.root)
            saves.judge(at >= flushed)
            states += 1
        if at % 5 == 0:
            saves.finish()
    assert states > 180
