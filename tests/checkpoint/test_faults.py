"""Kill, starve and deceive a save at every one of its I/O calls: the previous or the new checkpoint is always whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.processes import fork, kill_at, wait
from tests.checkpoint.states import full_state
from tuner.checkpoint.load import content_sha256, newest, open_checkpoint
from tuner.checkpoint.prune import prune
from tuner.checkpoint.save import CheckpointDir, save
from tuner.errors import MachineError
from tuner.runtime.files import publish_dir, sweep


def save_and_prune(checkpoints: Path, run_id: str) -> None:
    """What a run does at step 2: clear leftovers, save, prune."""
    sweep(checkpoints)
    save(CheckpointDir(checkpoints, run_id), 2, full_state(2), {"step": 2}, {})
    prune(checkpoints, 1)


@pytest.fixture
def base(tmp_path: Path) -> tuple[Path, str, str]:
    """A directory with step 1, and the content hashes of steps 1 and 2."""
    run = CheckpointDir(tmp_path / "base", "r0")
    first = content_sha256(open_checkpoint(save(run, 1, full_state(1), {"step": 1}, {})))
    other = CheckpointDir(tmp_path / "other", "r0")
    second = content_sha256(open_checkpoint(save(other, 2, full_state(2), {"step": 2}, {})))
    return run.path, first, second


def killed(checkpoints: Path, run_id: str, count: int) -> bool:
    """Save in a child that dies at its `count`-th call; false when it finished before."""

    def work() -> None:
        kill_at(count)
        save_and_prune(checkpoints, run_id)

    code = wait(fork(work))
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_killed_at_every_call_and_again_in_the_recovery(tmp_path: Path, base: tuple[Path, str, str]) -> None:
    source, first, second = base
    seen: set[str] = set()
    count = 1
    while True:
        checkpoints = tmp_path / f"kill-{count}"
        shutil.copytree(source, checkpoints)
        fired = killed(checkpoints, "r1", count)
        info = newest(checkpoints, pytest.fail)
        assert info is not None
        seen.add(content_sha256(info))
        assert seen <= {first, second}
        if not fired:
            break
        killed(checkpoints, "r2", count)
        assert newest(checkpoints, pytest.fail) is not None
        save_and_prune(checkpoints, "r3")
        sweep(checkpoints)
        assert os.listdir(checkpoints) == ["step-2"]
        assert content_sha256(open_checkpoint(checkpoints / "step-2")) == second
        shutil.rmtree(checkpoints)
        count += 1
    assert seen == {first, second}
    assert count > 20


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("write", errno.ENOSPC),
        ("write", errno.EDQUOT),
        ("fsync", errno.EIO),
        ("rename", errno.EIO),
        ("mkdir", errno.EROFS),
    ],
)
def test_an_error_at_every_call(
    tmp_path: Path, base: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    source, first, second = base
    real = getattr(os, name)
    failures = 0
    for count in range(1, 1000):
        checkpoints = tmp_path / f"error-{count}"
        shutil.copytree(source, checkpoints)
        left = count

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left <= 0:  # a full disk stays full
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                save(CheckpointDir(checkpoints, "r"), 2, full_state(2), {"step": 2}, {})
                failed = False
            except MachineError as error:
                failed = True
                assert str(checkpoints) in error.message
                assert os.strerror(code) in error.message
                assert name != "write" or "needed" in error.message
        info = newest(checkpoints, pytest.fail)
        assert info is not None
        assert content_sha256(info) in (first, second)
        if name == "write" and failed:
            assert os.listdir(checkpoints) == ["step-1"]
        if not failed:
            break
        failures += 1
    assert failures >= (1 if name in ("rename", "mkdir") else 5)


def test_short_writes_are_completed(
    tmp_path: Path, base: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, second = base
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[: max(1, len(data) // 2)]))
    path = save(CheckpointDir(source, "r"), 2, full_state(2), {"step": 2}, {})
    monkeypatch.undo()
    assert content_sha256(open_checkpoint(path)) == second


class Recorder:
    """Notes what is written, flushed and renamed, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drop: str | None = None) -> None:
        self.events: list[tuple[str, str]] = []
        fsync, write, rename = os.fsync, os.write, os.rename

        def recorded_fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if drop is None or not Path(path).name.startswith(drop):
                self.events.append(("fsync", path))
                fsync(descriptor)

        def recorded_write(descriptor: int, data: bytes) -> int:
            self.events.append(("write", os.readlink(f"/proc/self/fd/{descriptor}")))
            return write(descriptor, data)

        def recorded_rename(source: Path, target: Path) -> None:
            self.events.append(("rename", str(target)))
            rename(source, target)

        monkeypatch.setattr(os, "fsync", recorded_fsync)
        monkeypatch.setattr(os, "write", recorded_write)
        monkeypatch.setattr(os, "rename", recorded_rename)

    def problems(self, final: Path) -> list[str]:
        """What a power loss after the save could still take away."""
        commit = self.events.index(("rename", str(final)))
        before, after = self.events[:commit], self.events[commit + 1 :]
        found = []
        tmp = next(str(Path(path).parent) for kind, path in before if kind == "write" and "/.tmp-" in path)
        for name in os.listdir(final):
            path = f"{tmp}/{name}"
            if ("fsync", path) not in before[_last(before, ("write", path)) :]:
                found.append(f"{name} was not flushed before the commit")
        if ("fsync", tmp) not in before[_last_write_in(before, tmp) :]:
            found.append("the directory was not flushed before the commit")
        if ("fsync", str(final.parent)) not in after:
            found.append("the commit itself was not flushed")
        return found


def _last(events: list[tuple[str, str]], event: tuple[str, str]) -> int:
    return max(index for index, other in enumerate(events) if other == event)


def _last_write_in(events: list[tuple[str, str]], directory: str) -> int:
    return max(index for index, (kind, path) in enumerate(events) if kind == "write" and path.startswith(directory))


def test_everything_is_flushed_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    final = save(
        CheckpointDir(tmp_path / "checkpoints", "r"), 1, full_state(), {}, {}, {"logits": full_state()["model/weight"]}
    )
    monkeypatch.undo()
    assert recorder.problems(final) == []


@pytest.mark.parametrize("drop", ["rank-", "index", "state", "probe", "manifest", ".tmp-", "checkpoints"])
def test_the_recorder_notices_a_dropped_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop: str) -> None:
    recorder = Recorder(monkeypatch, drop)
    final = save(
        CheckpointDir(tmp_path / "checkpoints", "r"), 1, full_state(), {}, {}, {"logits": full_state()["model/weight"]}
    )
    monkeypatch.undo()
    assert len(recorder.problems(final)) == 1


def test_the_kill_campaign_notices_a_save_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(tmp: Path, final: Path) -> None:
        os.mkdir(final)
        for name in sorted(os.listdir(tmp)):
            os.rename(tmp / name, final / name)
        os.rmdir(tmp)

    assert publish_dir is not in_place
    monkeypatch.setattr("tuner.checkpoint.save.publish_dir", in_place)
    torn = 0
    for count in range(1, 200):
        checkpoints = tmp_path / f"kill-{count}"
        fired = killed(checkpoints, "r1", count)
        warnings: list[str] = []
        newest(checkpoints, warnings.append)
        torn += bool(warnings)
        if not fired:
            break
    assert torn > 0
