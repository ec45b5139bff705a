"""Forked children for tests: ranks of a gloo group, and victims that are killed at their Nth I/O call."""

from __future__ import annotations

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

SHIMMED = ("fsync", "rename", "write", "mkdir", "unlink", "rmdir")
TIMEOUT_S = 60.0


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child; returns its process id. The child exits 0, or 1 after printing a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The child's exit code, or minus the signal that ended it; one that hangs is killed and fails the test."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a child process hangs")


def run_ranks(world_size: int, directory: Path, work: Callable[[int], None]) -> list[int]:
    """Run `work(rank)` in a gloo group of forked processes; returns their exit codes."""
    meeting = directory / f"meeting-{world_size}-{time.monotonic_ns()}"

    def rank_main(rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"file://{meeting}", timedelta(seconds=20), rank=rank, world_size=world_size)
        work(rank)
        dist.destroy_process_group()

    children = [fork(lambda rank=rank: rank_main(rank)) for rank in range(world_size)]
    return [wait(child) for child in children]


def shim(before: Callable[[str, tuple[Any, ...]], None], names: tuple[str, ...] = SHIMMED) -> None:
    """Have every named function of `os` call `before(name, arguments)` first. For forked children only."""

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before(name, args)
            return real(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, wrapped(name, getattr(os, name)))


def kill_at(count: int, names: tuple[str, ...] = SHIMMED) -> None:
    """Kill this process with SIGKILL at its `count`-th shimmed call (from 1); a write is cut in half first."""
    left = count
    real_write = os.write

    def before(name: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if name == "write":
                real_write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    shim(before, names)
