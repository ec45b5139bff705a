"""Locks between processes."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tuner.errors import MachineError
from tuner.runtime.lock import FileLock

HOLD = """
import sys, time
from tuner.runtime.lock import FileLock
from pathlib import Path
with FileLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path, root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_holder_is_named_and_its_death_frees_the_lock(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "lock"
    process = holder(path, root)
    try:
        with pytest.raises(MachineError, match=rf"in use by process {process.pid} on .*lock"):
            FileLock(path).acquire(wait=False)
        waits: list[str] = []
        lock = FileLock(path, on_wait=lambda name: (waits.append(name), process.send_signal(signal.SIGKILL))[0])
        with lock:
            assert lock.held
        assert len(waits) == 1
        assert not lock.held
    finally:
        process.kill()
        process.communicate()


def test_one_holder_at_a_time_within_a_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as first:
        with pytest.raises(MachineError, match=str(os.getpid())):
            FileLock(path).acquire(wait=False)
        with pytest.raises(RuntimeError, match="twice"):
            first.acquire(wait=False)
    with FileLock(path, wait=False):
        pass
    FileLock(path).release()


def test_release_frees_the_lock_below_a_forked_child(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.acquire(wait=False)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        lock.release()
        FileLock(tmp_path / "lock").acquire(wait=False)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_unusable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="missing/lock"):
        FileLock(tmp_path / "missing" / "lock").acquire(wait=True)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(MachineError, match="link"):
        FileLock(tmp_path / "link").acquire(wait=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tuner.runtime.lock.fcntl.flock", flock)
    with pytest.raises(MachineError, match=f"{tmp_path}: its file system has no locks") as caught:
        FileLock(tmp_path / "lock", wait=False).acquire(wait=False)
    assert "output_dir" in str(caught.value.hint)


def test_a_lock_that_cannot_be_closed_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "lock", wait=False)
    lock.acquire(wait=False)

    def close(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("tuner.runtime.lock.os.close", close)
        lock.release()
    with FileLock(tmp_path / "lock", wait=False):
        assert not lock.held
