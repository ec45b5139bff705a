"""What a launch is asked for besides the recipe, and what it gives back: plain values that cross to its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from tuner.config.load import LoadedRecipe, load_recipe, recipe_dict
from tuner.runtime.console import Level
from tuner.setup.settled import Settled

Resume = Literal["auto", "must", "never"] | Path


@dataclass(frozen=True)
class HandedOver:
    """What the process that started the ranks has checked and prepared a moment ago, so that they need not."""

    prepared: Path
    checkpoint: Path | None
    """The checkpoint to resume from, whose files it hashed."""
    command: tuple[str, ...]
    """Its command line, which the run records."""
    settled: Settled | None = Settled()
    """What it settled for all ranks; None: rank 0 does, on a machine that may be another."""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What parts of the launch have found, as plain values, by their names."""


@dataclass(frozen=True)
class LaunchOptions:
    """What a launch is asked for besides the recipe."""

    resume: Resume = "never"
    """auto resumes where there is a run to resume, must fails without one, never refuses to touch one.

    A path, of a checkpoint or of a run with one, begins a new run there, and resumes the run that began so.
    """
    prepared: Path | None = None
    """Prepared data to use instead of the cache's."""
    no_prepare: bool = False
    """Fail where the data is not prepared yet."""
    dry_run: bool = False
    """Say what would be done and stop; only prepared data may be written."""
    reset: tuple[str, ...] = ()
    """Parts of the run that start afresh where it is resumed, as `tuner.run.changes.parse_reset` gives them."""
    on: Literal["here", "ray"] = "here"
    """Where its processes run: those of this machine or of the launcher that started this one, or a Ray cluster's."""
    level: Level = "info"
    """Messages of this level and above go to stderr."""
    handed_over: HandedOver | None = None


@dataclass(frozen=True)
class RankJob:
    """The work of a rank that a launch starts: the recipe, and the options."""

    recipe: dict[str, Any]
    text: str
    recipe_path: Path | None
    origins: dict[str, str]
    """Where each key is written: others have their default, which a launch may change."""
    options: LaunchOptions

    @staticmethod
    def of(loaded: LoadedRecipe, options: LaunchOptions) -> RankJob:
        """The job of every rank of a launch."""
        return RankJob(recipe_dict(loaded.recipe), loaded.text, loaded.path, loaded.origins, options)

    def loaded(self) -> LoadedRecipe:
        """The recipe as the command loaded it."""
        return replace(load_recipe(self.recipe), text=self.text, path=self.recipe_path, origins=self.origins)


@dataclass(frozen=True)
class RunResult:
    """How a launch ended."""

    run_dir: Path
    status: Literal["finished", "stopped", "planned"]
    step: int
    total_steps: int
    checkpoint: Path | None
    metrics: dict[str, Any]


JOB: TypeAdapter[RankJob] = TypeAdapter(RankJob)
RESULT: TypeAdapter[RunResult] = TypeAdapter(RunResult)
"""How they are written as JSON and read again."""
