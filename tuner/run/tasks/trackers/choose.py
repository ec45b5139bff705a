"""The trackers that a recipe may name: what each needs, how it is opened, and the hook that feeds it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tuner.config.recipe import LoggingSection
from tuner.errors import MachineError, TunerError
from tuner.run.tasks.hooks import Registration, Report
from tuner.run.tasks.trackers.outbox import Memory, Outbox
from tuner.run.tasks.trackers.stop_tags import StopTags
from tuner.run.tasks.trackers.tracker import TrackedRun, Tracker, point_of, points_of_file
from tuner.rundir.layout import METRICS
from tuner.rundir.layout import TRACKERS as TRACKERS_DIR
from tuner.train.plan import Cadence
from tuner.train.tasks import EventStage

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
    """Check that every tracker's library is installed, and its key at hand. Raises MachineError. No network is used."""
    for name in names:
        known = TRACKERS[name]
        missing = [module for module in known.modules if not _installed(module)]
        if missing:
            raise MachineError(
                f"logging.trackers: {name} needs the library {', '.join(missing)}",
                hint=f"install it: pip install {known.packages}",
            )
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
        held = tracker.held()
        if held is not None:
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
