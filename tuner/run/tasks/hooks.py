"""The task that calls user code and trackers with a frozen report of how a run is getting on; they never see the model.

They are called in the order of the recipe, on rank 0 alone unless the recipe says each: what a report says is global,
but for a batch. What one asks for in return is agreed on by all ranks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.config.recipe import HookSection
from tuner.data.batches import Batch
from tuner.errors import PluginError, TunerError
from tuner.runtime.plugins import Plugin, failure, load, require_call, source_file
from tuner.runtime.process import Collective, gloo_group
from tuner.train.plan import Cadence
from tuner.train.progress import Progress
from tuner.train.step_parts import StepForwards, StepPart
from tuner.train.tasks import Event, EventStage, Request, Status, Task

ANYWHERE = Path("/")
"""Files of a loaded recipe are absolute already."""


ASKS = {"stop": Request.STOP, "save": Request.SAVE, "evaluate": Request.EVALUATE, "export": Request.EXPORT}
"""What a hook may return, or a list of them, to have it done after the current step."""


@dataclass(frozen=True)
class Forward:
    """One forward of a step on this process, in arrays that cannot be written to."""

    input_ids: npt.NDArray[np.int64]
    """int64[T]: tokens of documents that lie end to end."""
    targets: npt.NDArray[np.int64]
    """int64[T]: the token after each, -100 where it is not trained."""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    documents: npt.NDArray[np.int64]
    """int64[len(lengths)]: their numbers in the prepared data; none of rows that only keep this process in step."""

    @staticmethod
    def of(batch: Batch) -> Forward:
        """That of a batch; its arrays are the batch's own memory."""
        views = [one.view() for one in (batch.input_ids, batch.targets, batch.documents)]
        for view in views:
            view.flags.writeable = False
        ids, targets, documents = views
        return Forward(ids, targets, batch.lengths, documents)


@dataclass(frozen=True)
class RunFacts:
    """What all reports of a launch have in common."""

    run_dir: Path
    run_id: str
    """The same for every launch of a run."""
    total_steps: int
    recipe: Mapping[str, Any]
    """The resolved recipe as plain values."""
    from_step: int
    """The step that this launch began at: 0, or the one it resumed from."""
    rank: int = 0
    """The process that calls the hook."""


@dataclass(frozen=True, kw_only=True)
class Report(RunFacts):
    """What a hook is called with. Its mappings are the hook's own copies: changing them changes nothing elsewhere."""

    stage: EventStage
    """start, window, epoch, batch, step, evaluation, save, export or end."""
    step: int
    """Optimizer steps taken so far; at batch the step that is about to be taken."""
    tokens: int
    """Tokens seen so far, padding and prompts included."""
    metrics: Mapping[str, Any]
    """The line of metrics.jsonl at step and evaluation, which window or epoch is over; empty elsewhere."""
    path: Path | None
    """The checkpoint at save, the directory at export; None elsewhere."""
    status: Status
    """running; at end how the launch ended."""
    batch: tuple[Forward, ...]
    """At batch the forwards of the step on this process; empty elsewhere."""


Hook = Callable[[Report], Request | None]
"""It takes note of a report, and may ask for something; an exception stops the run in order."""


@dataclass(eq=False)
class Registration:
    """A hook, and when it is called: at its stages, and of steps and batches at those of its cadence."""

    hook: Hook
    stages: frozenset[EventStage]
    cadence: Cadence
    called_at: float = field(default_factory=time.monotonic)

    def wants(self, stage: EventStage, step: int, now: float) -> bool:
        """Whether it is called at this stage of this step; ``now`` is in seconds of a monotonic clock."""
        if stage not in self.stages:
            return False
        is_rare = stage not in {"step", "batch"}
        return is_rare or self.cadence.due_at(step) or self.cadence.due_after(now - self.called_at)


class Hooks(Task, StepPart):
    """The trackers and hooks of a launch, on ranks other than 0 those that each calls."""

    def __init__(self, registrations: Sequence[Registration], facts: RunFacts, progress: Progress) -> None:
        self._progress = progress
        self._active = [(item, replace(facts, recipe=copy.deepcopy(facts.recipe))) for item in registrations]
        self._asked, self._epoch, self._begun = Request.NONE, 0, False
        self.error: TunerError | None = None
        """What the first hook that failed raised: the run is to save, stop, and raise it."""

    def start(self) -> None:
        """Report the start. Collective; raises on every rank what a hook raises."""
        self._epoch, self._begun = int(self._progress.epoch), True
        self.notify(Event("start", self._progress.step, self._progress.tokens))
        Collective(gloo_group()).together(self.raise_error)

    def between_steps(self, agreed: Request) -> Iterable[Event]:
        """An epoch is over with the step that takes its last row."""
        progress = self._progress
        if int(progress.epoch) > self._epoch:
            self._epoch = int(progress.epoch)
            yield Event("epoch", progress.step, progress.tokens, {"epoch": self._epoch})

    def request(self) -> Request:
        """What hooks asked for since the last step; a stop, where one has failed."""
        asked, self._asked = self._asked, Request.NONE
        return asked if self.error is None else asked | Request.STOP

    @property
    def wants_batches(self) -> bool:
        """Whether a hook is to see the batches of steps: this is a part of them then."""
        return any("batch" in item.stages for item, _ in self._active)

    def before_forward(self, step: StepForwards) -> None:
        """Show the batches of a step; before the launch has begun it is none of the run's."""
        if self._begun:
            event = Event("batch", self._progress.step + 1, self._progress.tokens)
            self.notify(event, tuple(map(Forward.of, step.batches.micro)))

    def exported(self, path: Path) -> None:
        """An export is done."""
        self.notify(Event("export", self._progress.step, self._progress.tokens, path=path))

    def notify(self, event: Event, batch: tuple[Forward, ...] = ()) -> None:
        """Call every hook that wants this stage. It never raises: a hook that fails is dropped and kept in `error`."""
        now = time.monotonic()
        for entry in list(self._active):
            registration, facts = entry
            if not registration.wants(event.stage, event.step, now):
                continue
            if event.stage == "step" or (event.stage == "batch" and "step" not in registration.stages):
                registration.called_at = now
            own = {**vars(event), "metrics": copy.deepcopy(event.metrics)}
            report = Report(**vars(facts), **own, batch=batch)
            try:
                self._asked |= registration.hook(report) or Request.NONE
            except TunerError as error:
                self._active.remove(entry)
                self.error = self.error or error

    def raise_error(self) -> None:
        """Raise what a hook raised, if one did."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class UserHook:
    """A user's callable whose failure names it, the stage, the step and the line of its own code."""

    name: str
    call: Callable[[Report], object]
    file: Path | None

    def __call__(self, report: Report) -> Request:
        """Call it; what it asks for. Raises PluginError for whatever it raises, and for what nobody can ask for."""
        at = f"hook {self.name} failed at {report.stage}, step {report.step}"
        try:
            returned = self.call(report)
        except (Exception, SystemExit) as error:
            raised = failure(at, error, self.file)
            raised.hint = f"fix it, then resume with: tuner resume {report.run_dir}"
            raise raised from error
        return _requests(returned, report, at)


def _requests(returned: object, report: Report, at: str) -> Request:
    """What a hook asks for by what it returned. Raises PluginError for anything else, and for what cannot be done."""
    wanted: Sequence[Any] = [] if returned is None else returned if isinstance(returned, (list, tuple)) else [returned]
    if not all(isinstance(one, str) and one in ASKS for one in wanted):
        raise PluginError(f"{at}: it returned {returned!r}; what it may return is None, {', '.join(ASKS)}, or a list")
    section = report.recipe.get("export", {})
    if "export" in wanted and section.get("every") in {None, "never"} and not section.get("at_end"):
        said = f"{at}: it asked for an export, and the recipe has none"
        raise PluginError(said, hint=f"tuner resume {report.run_dir} --export.at_end true")
    return reduce(or_, (ASKS[one] for one in wanted), Request.NONE)


def check_hooks(sections: Sequence[HookSection]) -> None:
    """Load every hook of a recipe and check its signature, without calling it. Raises PluginError."""
    for section in sections:
        _check(load(section.use, "tuner.hooks", ANYWHERE), section)


def user_hook(section: HookSection, cadence: Cadence) -> Registration:
    """Build one hook: a class is called with the options, once; a function with the report and the options each time.

    Raises PluginError for one that does not load, does not fit, or fails when it is built.
    """
    plugin = load(section.use, "tuner.hooks", ANYWHERE)
    _check(plugin, section)
    file, name = source_file(plugin), section.use.rpartition("/")[2]
    options = copy.deepcopy(section.options)
    call: Callable[[Report], object] = partial(plugin, **options)
    if isinstance(plugin, type):
        try:
            call = plugin(**options)
        except (Exception, SystemExit) as error:
            raise failure(f"hook {name} could not be built", error, file) from error
    return Registration(UserHook(name, call, file), frozenset(section.stages), cadence)


def _check(plugin: Plugin, section: HookSection) -> None:
    if not isinstance(plugin, type):
        require_call(plugin, section.use, ("report",), section.options)
        return
    require_call(plugin, section.use, (), section.options)
    own = next((vars(base)["__call__"] for base in plugin.__mro__ if "__call__" in vars(base)), None)
    if own is None:
        raise PluginError(f"{section.use}: its objects cannot be called", hint="define __call__(self, report)")
    if isinstance(own, FunctionType):
        require_call(own, f"{section.use}.__call__", ("self", "report"), {})
