"""The trackers that a recipe may name: what a tracker is and is given, what each needs, how it is opened, and the hook
that feeds it.

Points leave in a thread of their own, so that a slow server never holds up a step. What was sent is written down in the
run directory after each delivery. A later launch resumes there, and sends what a killed one had written to
metrics.jsonl but not delivered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tuner.config.recipe import LoggingSection
from tuner.errors import DataError, MachineError, TunerError
from tuner.run.tasks.hooks import Registration, Report, RunFacts
from tuner.rundir.layout import METRICS, STOP
from tuner.rundir.layout import TRACKERS as TRACKERS_DIR
from tuner.rundir.records import Records
from tuner.runtime.files import read_json, write_json
from tuner.train.plan import Cadence
from tuner.train.tasks import EventStage


@dataclass(frozen=True)
class TrackedPoint:
    """One line of metrics.jsonl as numbers by name (`train/loss`), with the time it was seen (seconds since 1970)."""

    kind: str
    step: int
    values: Mapping[str, float]
    time_s: float


@dataclass(frozen=True)
class TrackedRun:
    """The run as trackers name it, and what the recipe says of them."""

    facts: RunFacts
    logging: LoggingSection

    @property
    def name(self) -> str:
        """What it is shown as."""
        return str(self.facts.recipe["name"])

    @property
    def first_new_step(self) -> int:
        """Steps from here on are taken, and sent, again by this launch: 0 from the start, else the resumed step + 1."""
        return self.facts.from_step + 1 if self.facts.from_step else 0


class Tracker(Protocol):
    """An open connection to one tracker's run. Any exception that a method raises means that nothing was taken."""

    id: str
    """What a later launch needs to resume the same run."""
    place: str
    """Where the run can be looked at, for people."""

    def held(self) -> Mapping[str, int] | None:
        """The newest step of each kind of line that the tracker itself holds; None where it cannot say."""

    def send(self, points: Sequence[TrackedPoint]) -> None:
        """Take points in the order of their steps, and keep them even if this process is killed right after."""

    def close(self, status: str) -> None:
        """The launch ended: finished, stopped or failed."""


def point_of(line: Mapping[str, Any]) -> TrackedPoint:
    """The numbers of a line, those of nested mappings joined with `/`; the line's kind comes first in each name."""
    kind, step = str(line["kind"]), int(line["step"])
    return TrackedPoint(kind, step, dict(_numbers(line, kind)), time.time())


def points_of_file(path: Path) -> list[TrackedPoint]:
    """All points of a metrics.jsonl; none where there is no file."""
    return [point_of(line) for line in Records(path).read()]


def _numbers(line: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{key}")
        elif isinstance(value, (int, float)) and key != "step":
            yield f"{prefix}/{key}", float(value)


_STAGES: tuple[EventStage, ...] = ("start", "step", "evaluation", "save", "end", "figures")


@dataclass(frozen=True)
class Known:
    """A tracker that a recipe may name."""

    open: Callable[[TrackedRun, str | None], Tracker]
    """Starts the tracker's run, or resumes that of an earlier launch by its id. Raises MachineError."""
    modules: tuple[str, ...] = ()
    """What it imports that may not be installed."""
    packages: str = ""
    """What to install then."""
    check: Callable[[], None] = lambda: None
    """Raises MachineError where it cannot be used; asks no network."""
    tags: Callable[[Any], Collection[str]] | None = None
    """Of a tracker that was opened, what the run's page says now; None where it has no page to set tags on."""
    takes_back: bool = False
    """Whether points of steps that a resumed run takes again may be sent again."""


def _called(tracker: str, name: str, *given: Any) -> Any:
    """What a tracker's own module makes by a name; it is imported only then: most runs have none."""
    return getattr(import_module(f"tuner.run.tasks.trackers.{tracker}"), name)(*given)


TRACKERS: dict[str, Known] = {
    "tensorboard": Known(
        partial(_called, "tensorboard", "TensorBoard"), ("tensorboard",), "tensorboard", takes_back=True
    ),
    "wandb": Known(
        partial(_called, "wandb", "Wandb"), ("wandb",), "wandb", partial(_called, "wandb", "require_login"),
        lambda tracker: tracker.tags(),
    ),
    "mlflow": Known(
        partial(_called, "mlflow", "Mlflow"), ("mlflow", "sqlalchemy", "alembic"), "mlflow-skinny sqlalchemy alembic"
    ),
}


def check_trackers(names: Sequence[str]) -> None:
    """Check that every tracker's library is installed, and its key set. Raises MachineError. No network is used."""
    for name in names:
        known = TRACKERS[name]
        if missing := [module for module in known.modules if not _installed(module)]:
            said = f"logging.trackers: {name} needs the library {', '.join(missing)}"
            raise MachineError(said, hint=f"install it: pip install {known.packages}")
        known.check()


@dataclass
class TrackerHook:
    """Opens a tracker when a launch starts, feeds it every line, and closes it at the end."""

    name: str
    logging: LoggingSection
    say: Callable[[str, str], None]
    warn: Callable[[str], None]
    outbox: Outbox | None = None

    def __call__(self, report: Report) -> None:
        """Take note of the report. Raises MachineError where the tracker cannot be opened."""
        if report.stage == "start":
            try:
                self.outbox = self._open(report)
            except TunerError:
                raise
            except Exception as error:  # of a foreign library, or of its server
                first = next(iter(str(error).splitlines()), "")
                others = ", ".join(name for name in self.logging.trackers if name != self.name)
                raise MachineError(
                    f"tracker {self.name} cannot be opened: {type(error).__name__}: {first}",
                    hint=f"fix it, or leave it out: --logging.trackers '[{others}]'",
                ) from error
        elif self.outbox is not None and report.stage in ("step", "evaluation", "figures"):
            self.outbox.put([point_of(report.metrics)])
        elif self.outbox is not None and report.stage == "end":
            self.outbox.close(report.status)

    def _open(self, report: Report) -> Outbox:
        run = TrackedRun(report, self.logging)
        memory = Memory(report.run_dir / TRACKERS_DIR / f"{self.name}.json")
        known_id, sent = memory.read()
        if TRACKERS[self.name].takes_back:
            sent = {kind: min(step, run.first_new_step - 1) for kind, step in sent.items()}
        tracker = TRACKERS[self.name].open(run, known_id)
        if (held := tracker.held()) is not None:
            newest = max(held.values(), default=-1)
            sent = {kind: min(step, newest) for kind, step in sent.items()} | dict(held)
        self.say("tracker", f"{self.name}: {tracker.place}")
        tags, wanted, look = TRACKERS[self.name].tags, self.logging.cancel_tags, None
        if tags is not None and wanted:
            stop = StopTags(partial(tags, tracker), wanted, self.logging.cancel_every.seconds)
            look = partial(stop.look, report.run_dir, self.say)
        outbox = Outbox(self.name, tracker, memory, sent, self.warn, look)
        outbox.put(points_of_file(report.run_dir / METRICS))
        return outbox


def tracker_hooks(
    section: LoggingSection, say: Callable[[str, str], None], warn: Callable[[str], None]
) -> list[Registration]:
    """The hooks of the recipe's trackers. They are notified of every step."""
    every_step, stages = Cadence((1,)), frozenset[EventStage](_STAGES)
    names = dict.fromkeys(section.trackers)
    return [Registration(TrackerHook(name, section, say, warn), stages, every_step) for name in names]


def _installed(module: str) -> bool:
    """Whether a real package is there: a directory of that name, such as `./wandb`, is none."""
    found = find_spec(module)
    return found is not None and found.origin is not None


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
        self._name, self._tracker, self._memory, self._sent = name, tracker, memory, dict(sent)
        self._warn, self._look, self._failures = warn, look, 0
        self._waiting: list[TrackedPoint] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
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


class StopTags:
    """Asks for the tags of the page at most each so many seconds, and has the launch stop for a new one of ``wanted``,
    in any case. One that was there before has stopped an earlier launch: the run can be resumed with it."""

    def __init__(self, tags: Callable[[], Collection[str]], wanted: Collection[str], every_s: float) -> None:
        self._tags, self._wanted, self._every_s = tags, {tag.lower() for tag in wanted}, every_s
        self._known: set[str] | None = None
        self._asked_at = -every_s

    def look(self, run_dir: Path, say: Callable[[str, str], None]) -> None:
        """Ask where it is time, for the first time at once; raises what the tracker's library does."""
        if time.monotonic() - self._asked_at < self._every_s:
            return
        self._asked_at = time.monotonic()
        found = self._wanted & {tag.lower() for tag in self._tags()}
        new = found - (found if self._known is None else self._known)
        self._known = found
        if new:
            say("stopping", f"the run's page has a new tag, {min(new)}")
            (run_dir / STOP).touch()
