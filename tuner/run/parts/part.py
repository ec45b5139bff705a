"""A launch, before it is built and after, and what a part of one is: a feature that some launches have in addition to
recipe, data, model, steps and checkpoints. ``run/preflight``, ``run/main`` and ``run/launch`` call each part in the
order of ``listed.PARTS``, at the moments that are named here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from tuner.checkpoint.save import WriteShards
from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.data.building.spec import PrepareSpec, prepare_spec
from tuner.data.prepared import PreparedData
from tuner.run.changes import Reset, starts_of
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import RunStatus
from tuner.run.tasks.console import TimeLeft
from tuner.run.tasks.log import LogTask
from tuner.rundir.directory import RunDir
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective
from tuner.runtime.stop import StopSignals
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved
from tuner.setup.timetable import Starts, Timetable
from tuner.train.prefetcher import BatchSource, Prefetcher
from tuner.train.progress import Progress
from tuner.train.tasks import Request, Task, Tasks


@dataclass(frozen=True)
class LaunchRequest:
    """What a launch is asked for, and what the run's directory says of it."""

    loaded: LoadedRecipe
    options: LaunchOptions
    status: RunStatus
    console: Console

    @cached_property
    def spec(self) -> PrepareSpec:
        """How the recipe's data are prepared; the tokenizer is loaded for it."""
        recipe = self.loaded.recipe
        return prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)


@dataclass(frozen=True)
class Preflight:
    """A launch that is ready to be planned: what the run's directory is to it, and its data."""

    status: RunStatus
    spec: PrepareSpec
    data: PreparedData
    data_dir: Path
    parts: tuple[Part, ...]
    """The optional features of this launch."""

    @property
    def starts(self) -> Starts:
        """Where each part of the run began last."""
        starts = starts_of(self.status.resets)
        for part in self.parts:
            starts = part.starts(starts)
        return starts


@dataclass(frozen=True)
class LaunchContext:
    """One launch of a run: what was built, how far it is, where it writes and what it listens to."""

    run: RunDir
    record: dict[str, Any]
    """Of the run; rank 0 keeps it up to date."""
    assembly: Assembly
    progress: Progress
    resets: tuple[Reset, ...]
    """What of the run started afresh, and where."""
    console: Console
    signals: StopSignals
    parts: tuple[Part, ...]
    """The optional features of this launch."""

    @property
    def run_id(self) -> str:
        """The same for every launch of a run."""
        return str(self.record["run_id"])


@dataclass(frozen=True)
class TaskNeeds:
    """What a part's tasks may ask of those that every launch has."""

    log: LogTask
    request: Callable[[], Request]
    """What the launch is asked for here, such as to stop."""
    time_left: TimeLeft
    write_by: Callable[[WriteShards], None]
    """Have the ranks' files of each save written in another way."""


class Part:
    """One thing that some launches have. What a part does not say is as in every launch.

    Each launch has its own object, which may keep what it learns from one moment to the next. All calls after
    ``check`` and ``prepare_data`` come on every rank alike, and may be collective, but for ``write_facts``.
    """

    name: ClassVar[str] = ""
    """Under which it hands anything over to the ranks that a launch starts."""
    changes_data: ClassVar[bool] = False
    """Whether the run trains on other prepared data from checkpoint to checkpoint."""
    after_saves: ClassVar[bool] = False
    """Whether its tasks run after the saves of a step; before its evaluation otherwise."""

    def __init__(self, recipe: Recipe) -> None:
        """Of a launch of the recipe as it is written: what is `auto` in it may become anything yet."""

    def check(self, request: LaunchRequest) -> None:
        """Look at files, shapes, rights and code that the part needs, before any device. Raises TunerError children."""

    def prepare_data(self, request: LaunchRequest) -> Path | RunResult | None:
        """The prepared data that the launch trains on, where they are not all of the recipe's; or the result of a
        launch that has nothing to train on."""
        return None

    def handed_over(self) -> dict[str, Any] | None:
        """What the ranks that this process starts need not look up again, as plain values."""
        return None

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Take what ``handed_over`` gave in the process that started this rank."""

    def starts(self, starts: Starts) -> Starts:
        """Where each part of the run began last."""
        return starts

    def after_plan(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """Check and announce what every `auto` became. Raises RecipeError."""

    def derivation(self, resolved: Resolved, table: Timetable) -> str | None:
        """How the number of steps follows, where the part decides on it, in words."""
        return None

    def around(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> AbstractContextManager[None]:
        """What holds from before the model is built to the end of the launch."""
        return nullcontext()

    def agree(self, spec: PrepareSpec, ranks: Collective) -> Path | None:
        """Have every rank go by what rank 0 found; the prepared data where that makes it others. Collective."""
        return None

    def before_build(self, ready: Preflight, resolved: Resolved, console: Console) -> Resolved:
        """What the model is built by."""
        return resolved

    def after_build(self, ready: Preflight, assembly: Assembly, console: Console, signals: StopSignals) -> Assembly:
        """What the launch trains with, now that the model is there as it is before the first step."""
        return assembly

    def progress_created(self, ready: Preflight, assembly: Assembly, progress: Progress) -> None:
        """The steps of the run are planned, and ``progress`` counts from the first: before any checkpoint is read."""

    def write_facts(self, run_dir: Path) -> None:
        """Write down, as the launch begins, what later ones go by. Rank 0, under the run's lock."""

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What it does between steps."""
        return ()

    def before_steps(self, context: LaunchContext, tasks: Tasks) -> None:
        """The run is where its checkpoint was, and no step is trained yet."""

    def source(self, prepared: Prefetcher) -> BatchSource | None:
        """What the launch's steps train on, where it is not (all of) the ``prepared`` rows. One part has a source."""
        return None

    def state(self, step: int) -> Mapping[str, Any]:
        """Its part of a checkpoint's JSON state after ``step``."""
        return {}

    def facts(self, step: int) -> Mapping[str, Any]:
        """What a checkpoint's manifest says after ``step`` in place of what all have; asked on rank 0, maybe later."""
        return {}
