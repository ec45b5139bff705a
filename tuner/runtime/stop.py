"""Stop signals: the first one asks, the second one ends the process."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tuner.errors import ExitCode

LAUNCHER_REPEAT_S = 2.0
COUNTED_ABOVE = "TUNER_SIGNALS_COUNTED_ABOVE"
"""Set where the process that started this one counts the signals: it ends this one at the second itself."""


def is_ignored(number: signal.Signals) -> bool:
    """Whether this process was started to ignore a signal, or does so now."""
    return signal.getsignal(number) is signal.SIG_IGN


class StopSignals:
    """While entered, SIGTERM, SIGINT, SIGUSR1 and SIGHUP set `requested`; one more ends the process with code 130.

    A terminal that is closed sends SIGHUP, and its shell may send another: a SIGHUP is never the one more.
    A signal that the process was started to ignore stays ignored: SIGHUP under nohup, SIGINT in a script's background
    job, which a Ctrl-C meant for the script must not stop.
    torchrun passes a Ctrl-C on although the terminal has sent it already: signals that come within `repeat_s`
    seconds of the first count as the first. The default is 2 s below torchrun and 0 s elsewhere.
    `on_request` is called with the signal's name from within the handler: let it print one line at most. `at_once`
    is called before the process ends at the second signal: what must not outlive it ends there.
    Outside the main thread, where Python allows no handlers, entering changes nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

    def __init__(
        self,
        on_request: Callable[[str], None] | None = None,
        repeat_s: float | None = None,
        at_once: Callable[[], None] | None = None,
    ) -> None:
        below_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if repeat_s is None:
            repeat_s = LAUNCHER_REPEAT_S if below_torchrun else 0.0
        # A scheduler may signal every process of a job, and the one that started this passes its own signal on.
        self._repeat_s = math.inf if COUNTED_ABOVE in os.environ else repeat_s
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
            for number in self.SIGNALS:
                if not is_ignored(number):
                    self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        while self._old:
            number, handler = self._old.popitem()
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

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
            finally:
                os._exit(ExitCode.INTERRUPTED)
