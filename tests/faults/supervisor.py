"""Runs work in a forked child, counts every system call that changes files below a directory, and strikes at one."""

import errno
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults import notify
from tests.faults.calls import RULES, SPACE, Call, understand

Kind = Literal["kill", "tear", "kill-one", "full", "error", "short"]
PATIENCE_S = 120.0
SILENT = re.compile(r"/(?:dev/(?!shm/)|proc/|memfd:|sys/)|.* \(deleted\)$")
"""What is no file that stays."""


@dataclass(frozen=True)
class Fault:
    """What happens at the `at`-th counted call (from 1), before it runs.

    kill: every process of the child dies; tear: likewise, half of a write's bytes are written first; kill-one: the
    process that made the call dies alone; full: the disk is full from here on; error: EIO, once; short: half a write.
    """

    at: int
    kind: Kind
    only: tuple[str, str] = ("", "")
    """What is in the path of the calls that count, and their kind; by default all count."""

    def counts(self, call: Call) -> bool:
        """Whether a call is one of those that `at` counts."""
        words, kind = self.only
        return words in call.path and kind in ("", call.kind)


@dataclass
class Trace:
    """What a child did: its counted calls in order, calls elsewhere, sockets and programs, and how it ended."""

    calls: list[Call] = field(default_factory=list)
    strays: list[Call] = field(default_factory=list)
    others: list[Call] = field(default_factory=list)
    struck_at: int = 0
    """The counted call at which the fault struck first (from 1); 0 where it did not."""
    code: int = 0
    """Exit code, or minus the signal."""
    output: str = ""
    seconds: float = 0.0
    grown_mib: int = 0
    """The most memory that it, or a process that it started, held, without what it had from the start."""
    hung: bool = False

    @property
    def struck(self) -> bool:
        """Whether the fault struck."""
        return self.struck_at > 0


class Supervisor:
    """The parent's side of one child."""

    def __init__(self, root: Path, fault: Fault | None, record: bool) -> None:
        self.root = str(root)
        self.below = self.root + "/"
        self.fault = fault
        self.record = record
        self.trace = Trace()
        self.child = 0
        self.counted = 0

    def serve(self, listener: int) -> None:
        """Answer every call until the last process below the child is gone."""
        notify.hurry(listener)
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        waited, before = 0.0, time.monotonic()
        while True:
            ready = poll.poll(1000)
            now = time.monotonic()
            waited, before = waited + min(now - before, 2.0), now  # this process may have been stopped meanwhile
            if waited > PATIENCE_S and not self.trace.hung:
                self.trace.hung = True
                self._kill()
            if not ready:
                continue
            if ready[0][1] & select.POLLIN:
                notice = notify.receive(listener)
                if notice is not None:
                    self._meet(listener, notice)
            elif ready[0][1] & select.POLLHUP:
                return

    def _meet(self, listener: int, notice: notify.Notice) -> None:
        try:
            call = understand(notice, self.record)
        except (OSError, ValueError):  # killed while it waited
            notify.go_on(listener, notice)
            return
        inside = call.path == self.root or call.path.startswith(self.below) or call.other.startswith(self.below)
        if not inside:
            self._note(call)
        elif call.kind != "close" or call.flags & (os.O_WRONLY | os.O_RDWR):
            self.trace.calls.append(call)
            if self.fault is not None and self._is_answered(listener, notice, call, self.fault):
                return
        notify.go_on(listener, notice)

    def _is_answered(self, listener: int, notice: notify.Notice, call: Call, fault: Fault) -> bool:
        """Whether the fault is the answer to a counted call, which does not run then."""
        self.counted += fault.counts(call)
        if self.counted < fault.at or (fault.kind == "full" and not (call.kind in SPACE or call.creates)):
            return False
        if fault.kind == "full":
            self.trace.struck_at = self.trace.struck_at or len(self.trace.calls)
            notify.answer(listener, notice, error=errno.ENOSPC)
        elif not self.trace.struck and self.counted == fault.at:
            self.trace.struck_at = len(self.trace.calls)
            return self._strike(listener, notice, call, fault.kind)
        elif fault.kind in ("kill", "tear"):
            self.trace.calls.pop()  # another process of the child, on its way down
            self._kill()
        else:
            return False
        return True

    def _strike(self, listener: int, notice: notify.Notice, call: Call, kind: Kind) -> bool:
        """Whether it did: nothing is half done but a write."""
        if kind == "short" and not (call.kind == "write" and call.size > 1):
            self.trace.struck_at = 0
            return False
        if kind == "error":
            notify.answer(listener, notice, error=errno.EIO)
        elif kind == "short":
            notify.answer(listener, notice, self._half(notice, call))
        elif kind == "kill-one":
            os.kill(notify.process_of(notice.thread), signal.SIGKILL)
        else:
            if kind == "tear":
                self._half(notice, call)
            self._kill()
        return True

    def _half(self, notice: notify.Notice, call: Call) -> int:
        """Do half of a write in the child's place."""
        data = call.data if call.data is not None else understand(notice, True).data
        if call.kind != "write" or data is None:
            return 0
        descriptor = notify.borrow(notice.thread, notice.arguments[0] & 0xFFFFFFFF)
        try:
            half = data[: len(data) // 2]
            if call.name.startswith("pwrite"):
                return os.pwrite(descriptor, half, notice.arguments[3])
            return os.write(descriptor, half)
        finally:
            os.close(descriptor)

    def _note(self, call: Call) -> None:
        if call.kind in ("socket", "program") or call.name == "io_uring_setup":
            self.trace.others.append(call)
        elif call.path.startswith("/") and not SILENT.match(call.path):
            changes = call.creates if call.kind == "open" else call.kind not in ("close", "flush", "map", "none")
            if changes:
                self.trace.strays.append(call)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)


def supervise(work: Callable[[], int], root: Path, fault: Fault | None = None, record: bool = False) -> Trace:
    """Run `work` in a child whose working directory is `root`; its result is the child's exit code.

    Returns what it did below `root`; with `record`, every written byte too.
    """
    ours, theirs = socket.socketpair()
    output = os.memfd_create("output")
    supervisor = Supervisor(root, fault, record)
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        ours.close()
        _be_the_child(work, root, theirs, output)
    theirs.close()
    supervisor.child = child
    began = _resident_mib(child)
    try:
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        ours.send(b".")
        if descriptors:
            supervisor.serve(descriptors[0])
            os.close(descriptors[0])
        _, status, usage = os.wait4(child, 0)
    finally:
        ours.close()
    trace = supervisor.trace
    trace.code = os.waitstatus_to_exitcode(status)
    trace.seconds = time.monotonic() - started
    trace.grown_mib = (usage.ru_maxrss >> 10) - began
    os.lseek(output, 0, os.SEEK_SET)
    with os.fdopen(output, "rb") as file:
        trace.output = file.read().decode(errors="replace")
    return trace


def _resident_mib(process: int) -> int:
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


def _be_the_child(work: Callable[[], int], root: Path, parent: socket.socket, output: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.chdir(root)
        listener = notify.install(RULES)
        socket.send_fds(parent, [b"."], [listener])
        parent.recv(1)
        os.close(listener)
        parent.close()
        code = work()
    except BaseException:  # noqa: BLE001 - told by the exit code
        traceback.print_exc()
    finally:
        os._exit(code)
