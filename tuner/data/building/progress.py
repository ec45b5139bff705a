"""How far a long preparation is, and how long it still takes, by bytes of input."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.runtime.console import Console, ProgressBar

PLAIN_EVERY_S = 30.0
"""Seconds between two lines where no bar can be drawn."""
MB = 1_000_000


class Pace:
    """Counts the bytes that are done, and says so: with a live bar on a terminal, else with a line now and then."""

    def __init__(
        self, console: "Console", bar: "ProgressBar", total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._bar = bar
        self._total = total
        self._clock = clock
        self._started = self._said = clock()
        self.done = 0

    def add(self, count: int) -> None:
        """Count `count` bytes more."""
        self.done += count
        now = self._clock()
        rate = self.done / max(now - self._started, 1e-9)
        self._bar.update(self.done // MB, f"{rate / MB:.1f} MB/s")
        if not self._console.is_live and now - self._said >= PLAIN_EVERY_S:
            self._said = now
            left = max(self._total - self.done, 0) / rate
            share = min(self.done / max(self._total, 1), 1.0)
            self._console.say(
                "encode", f"{share:.0%} of {self._total / MB:,.0f} MB  {rate / MB:.1f} MB/s  {_span(left)} left"
            )


@contextmanager
def pace(console: "Console | None", total: int) -> Iterator[Callable[[int], None]]:
    """Yield the function that counts bytes as they are done; `total` is the bytes of all input."""
    if console is None:
        yield lambda count: None
        return
    with console.progress("encode MB", max(total // MB, 1)) as bar:
        yield Pace(console, bar, total).add


def _span(seconds: float) -> str:
    """Seconds as `0:42` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
