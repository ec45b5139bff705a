"""What campaigns that strike have in common: their points, the faults of a network, and commands that are heard out."""

import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.fixtures.store_proxy import FAULTS, Proxy, Request
from tools.commands import Results, Start, one_line, say

T = TypeVar("T")
POINTS: dict[str, Any] = {
    "points": 500, "first": (0, "the number of the first, for campaigns side by side"), "out": Path,
}  # fmt: skip
"""What a campaign of numbered points is called with."""


def struck(options: Any, results: Results, point: Callable[[int], dict[str, Any]]) -> int:
    """Do the points that the results have not yet; the exit code, 1 where one of all found problems."""
    for number in range(options.first, options.first + options.points)[len(results.rows) :]:
        try:
            row = point(number)
        except Exception as error:
            row = {"problems": [one_line(error)]}
        results.add({"point": number, **row})
    bad = sum(bool(row["problems"]) for row in results.rows)
    say(f"{len(results.rows)} points, {bad} with problems")
    return int(bad > 0)


class Network:
    """What befalls the requests of a point: a strike at one of them, and faults of drawn kinds at a drawn rate."""

    def __init__(
        self, proxy: Proxy, draw: random.Random, kinds: Sequence[str], rates: Sequence[float], last: int
    ) -> None:
        self.proxy, self.asked = proxy, 0
        self.kind, self.rate = draw.choice(kinds), draw.choice(rates)
        names = draw.sample(sorted(FAULTS), draw.randint(1, len(FAULTS)))
        self._strikes_at = draw.randint(1, last)
        self._fault = lambda: draw.choice(names) if draw.random() < self.rate else None

    @contextmanager
    def around(self, strike: Callable[[], object]) -> Iterator[None]:
        """Within it requests meet their faults, and one of them the strike; at its end all are carried out."""

        def choose(_: Request) -> str | None:
            self.asked += 1
            if self.asked == self._strikes_at:
                strike()
            return self._fault()

        self.proxy.happened.clear()
        self.proxy.choose = choose
        yield
        self.proxy.choose = lambda _: None
        self.proxy.settle()

    def row(self) -> dict[str, Any]:
        """What came of it."""
        return {"kind": self.kind, "rate": self.rate, "requests": self.asked, "faults": len(self.proxy.happened)}


def heard(start: Start, wait: Callable[[Any], T], command: Sequence[str], **options: Any) -> tuple[T, str]:
    """Start a command and wait for it; what the wait gave, and the end of what the command said."""
    with tempfile.TemporaryFile("w+") as log:
        found = wait(start(command, stdout=log, stderr=log, **options))
        log.seek(0)
        return found, log.read()[-1500:]


def kill(pids: Iterable[int]) -> int:
    """Kill processes (SIGKILL) as far as they are there; how many there were to kill."""
    found = list(pids)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)
