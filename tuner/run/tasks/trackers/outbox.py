"""One tracker's mail: points leave in a thread of their own, so that a slow server never holds up a step.

What was sent is written down in the run directory after each delivery. A later launch resumes there, and sends
what a killed one had written to metrics.jsonl but not delivered.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import DataError
from tuner.run.tasks.trackers.tracker import TrackedPoint, Tracker
from tuner.runtime.files import read_json, write_json

SCHEMA = "tuner.tracker/1"
INTERVAL_S = 1.0
LONGEST_WAIT_S = 60.0
CLOSE_S = 60.0


@dataclass(frozen=True)
class Memory:
    """The file that remembers a tracker's run and the newest step sent of each kind of line."""

    path: Path

    def read(self) -> tuple[str | None, dict[str, int]]:
        """The tracker's run id and what was sent; (None, {}) before the first launch. Raises DataError."""
        if not self.path.is_file():
            return None, {}
        state = read_json(self.path)
        if state.get("schema") != SCHEMA or not isinstance(state.get("sent"), dict):
            raise DataError(f"{self.path}: not a tracker's state of this version ({state.get('schema')!r})")
        return state["id"], {str(kind): int(step) for kind, step in state["sent"].items()}

    def write(self, id_: str, sent: Mapping[str, int]) -> None:
        """Write it down, whole or not at all."""
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, {"schema": SCHEMA, "id": id_, "sent": dict(sent)})


class Outbox:
    """Sends points to a tracker about once a second, each kind's steps once and in order.

    A delivery that fails is warned of once and tried again, at longer and longer intervals, up to a last time at the
    end: the run continues without the tracker, and metrics.jsonl has every line.
    """

    def __init__(
        self, name: str, tracker: Tracker, memory: Memory, sent: Mapping[str, int], warn: Callable[[str], None],
        look: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """``look`` is called after each delivery, in the same thread; it may fail as one."""
        self._name = name
        self._tracker = tracker
        self._memory = memory
        self._sent = dict(sent)
        self._warn = warn
        self._waiting: list[TrackedPoint] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._look = look
        self._failures = 0
        memory.write(tracker.id, sent)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, points: Sequence[TrackedPoint]) -> None:
        """Have points sent, unless an earlier launch sent them already. Returns at once."""
        fresh = [point for point in points if point.step > self._sent.get(point.kind, -1)]
        with self._lock:
            self._waiting += fresh

    def close(self, status: str) -> None:
        """Send what is left and close the tracker; waits at most CLOSE_S seconds for it."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._waiting or self._thread.is_alive():
            self._warn(f"{self._name}: {len(self._waiting)} lines were not sent; metrics.jsonl has them")
        if not self._thread.is_alive():
            self._attempt(lambda: self._tracker.close(status))

    def _work(self) -> None:
        while not self._closing.wait(min(INTERVAL_S * 2 ** min(self._failures, 10), LONGEST_WAIT_S)):
            self._deliver()
            if self._look is not None:
                self._attempt(self._look)
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            points = list(self._waiting)
        if points and self._attempt(lambda: self._tracker.send(points)):
            with self._lock:
                del self._waiting[: len(points)]
            newest: dict[str, Any] = {point.kind: point.step for point in points}
            self._sent |= newest
            self._attempt(lambda: self._memory.write(self._tracker.id, self._sent))

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - of a foreign library, or of its server
            if self._failures == 0:
                first = next(iter(str(error).splitlines()), "")
                self._warn(f"{self._name}: {type(error).__name__}: {first}; training continues without it")
            self._failures += 1
            return False
        self._failures = 0
        return True
