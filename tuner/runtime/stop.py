"""Stop signals: training is asked by the first one and ended by the second; anything else ends at once, with 130.

Ending at once raises no exception. In the midst of loading a library one would leave half a module behind, or unwind
through C code that does not expect it; in a destructor it would be swallowed. What must not outlive the process is
undone in the handler: child processes are ended, temporary directories removed. The rest is safe to cut anywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tuner.errors import ExitCode
from tuner.runtime.members import member

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LAUNCHER_REPEAT_S = 2.0
GRACE_S = 3.0
"""What child processes get to end in order before they are killed."""
SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"
COUNTED_ABOVE = "TUNER_SIGNALS_COUNTED_ABOVE"
"""Set where the process that started this one counts the signals: it ends this one at the second itself."""


def is_ignored(number: signal.Signals) -> bool:
    """Whether this process was started to ignore a signal, or does so now."""
    return signal.getsignal(number) is signal.SIG_IGN


def put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install handlers again; None stands for one that was not installed from Python, and cannot be."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class StopSignals:
    """While entered, SIGTERM, SIGINT, SIGUSR1 and SIGHUP set `requested`; one more ends the process with code 130.

    A terminal that is closed sends SIGHUP, and its shell may send another: a SIGHUP is never the one more.
    A signal that the process was started to ignore stays ignored: SIGHUP under nohup, SIGINT in a script's background
    job, which a Ctrl-C meant for the script must not stop.
    torchrun passes a Ctrl-C on although the terminal has sent it already: below it, signals that come within 2 s of
    the first count as the first.
    `on_request` is called with the signal's name from within the handler: let it print one line at most. `at_once`
    is called before the process ends at the second signal: what must not outlive it ends there.
    Outside the main thread, where Python allows no handlers, entering changes nothing.
    """

    def __init__(
        self, on_request: Callable[[str], None] | None = None, at_once: Callable[[], None] | None = None
    ) -> None:
        # A scheduler may signal every process of a job, and the one that started this passes its own signal on.
        below_torchrun = LAUNCHER_REPEAT_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
        self._repeat_s = math.inf if COUNTED_ABOVE in os.environ else below_torchrun
        self._on_request = on_request
        self._at_once = at_once
        self.number: signal.Signals | None = None
        """The first signal; None before one came."""
        self._first_s = 0.0
        self._old: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.number is not None

    @property
    def signal_name(self) -> str | None:
        """The first signal's name, such as `SIGTERM`; None before one came."""
        return None if self.number is None else self.number.name

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if not is_ignored(number):
                    self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        put_back(self._old)
        self._old = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number = signal.Signals(number)
            self._first_s = now
            if self._on_request is not None:
                # A handler that interrupts a write to stderr cannot write there itself: "reentrant call".
                with contextlib.suppress(RuntimeError):
                    self._on_request(self.number.name)
        elif number != signal.SIGHUP and now - self._first_s >= self._repeat_s:
            # No clean-up: every file operation is safe to cut anywhere, and clean-up is what might hang.
            try:
                os.write(2, b"\nstopped at once; what was not saved is lost\n")
                if self._at_once is not None:
                    self._at_once()
                end_children((signal.SIGKILL,))
            finally:
                os._exit(ExitCode.INTERRUPTED)


_undo: list[Callable[[], object]] = []
_answers: list[Callable[[], int]] = []
_heeding = 0
"""The process that ends at a signal: one that is forked from it has nothing to undo."""
_is_leaving = False


def heed() -> None:
    """Have the stop signals end this process, from here on. Those that it was started to ignore stay ignored."""
    global _heeding  # noqa: PLW0603 - as process-wide as handlers are
    _heeding = os.getpid()
    for number in SIGNALS:
        if not is_ignored(number):
            signal.signal(number, _leave)


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """`heed` for the length of the block, where it is not in force anyway; outside the main thread nothing changes."""
    global _heeding  # noqa: PLW0603
    if _heeding == os.getpid() or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heed()
    try:
        yield
    finally:
        put_back(before)
        _heeding = 0


def over() -> None:
    """The work of this program is done and its result about to be given: a signal changes nothing any more."""
    if _heeding == os.getpid():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def undone(action: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """For the length of the block, `action` is called where a signal ends the process; what it raises is ignored.

    It runs in a signal handler: it imports nothing, and takes no lock that the main thread may hold.
    """
    return member(_undo, action)


def answered(answer: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
    """For the length of the block, `answer` says that a signal ended the process, and with which exit code."""
    return member(_answers, answer)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """For the length of the block no stop signal comes; one that was sent meanwhile comes at its end.

    A process that is started in it begins with the signals held back, until it calls `let_through`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """Let the stop signals come that whoever started this process held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def is_loading(frame: FrameType | None) -> bool:
    """Whether a handler interrupted the main thread, at `frame`, while it imports a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def say(line: str) -> None:
    """Write a line to stderr from within a handler, whatever the main thread was writing; a closed one is no error."""
    with contextlib.suppress(OSError):
        erased = SHOW_CURSOR if os.isatty(2) else b""
        os.write(2, erased + line.encode(errors="backslashreplace") + b"\n")


def end_children(signals: Iterable[int] = (signal.SIGTERM, signal.SIGKILL)) -> None:
    """End what this process started and, where a child leads a group, that group: by each signal in turn."""
    running = _children()
    for number in signals:
        for pid in running:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, number)
        deadline = time.monotonic() + GRACE_S
        while running and time.monotonic() < deadline:
            time.sleep(0.01)
            running = [pid for pid in running if _is_running(pid)]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    global _is_leaving  # noqa: PLW0603
    if _is_leaving or _heeding != os.getpid():
        os._exit(ExitCode.INTERRUPTED)
    _is_leaving = True
    code = int(ExitCode.INTERRUPTED)
    try:
        end_children()
        for action in reversed(_undo):
            with contextlib.suppress(Exception):  # the others are to be undone too; what stays is swept later
                action()
        code = _answers[-1]() if _answers else _said()
    finally:
        os._exit(code)


def _said() -> int:
    say("error: interrupted")
    return int(ExitCode.INTERRUPTED)


def _children() -> list[int]:
    """Process ids of those whose parent this process is, as Linux lists them."""
    found, me = [], os.getpid()
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            state, parent = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if int(parent) == me and state != b"Z":
                found.append(int(name))
    return found


def _is_running(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    return False
