"""Data that is prepared, and runs that are begun and resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tuner.api.given import RecipeSource, absolute, console_of, level_of, loaded_of, overrides_of
from tuner.config.load import LoadedRecipe
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.building.spec import prepare_spec
from tuner.run.changes import parse_reset
from tuner.run.options import LaunchOptions, RunResult
from tuner.run.status import nothing_to_do, resume_source, status_of
from tuner.run.stored import in_store
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

ResumeMode = Literal["auto", "must", "never"] | Path


def prepare_data(recipe: RecipeSource, quiet: bool = False) -> PreparedInfo:
    """Prepare the recipe's data, or find it prepared; progress goes to stderr.

    Raises RecipeError, DataError and MachineError as `tuner prepare-data` reports them.
    """
    found = loaded_of(recipe, fetches=True).recipe
    spec = prepare_spec(found.model, found.tokenizer, found.data, found.method, found.seed)
    return prepare(spec, console_of(found.logging.level, quiet))


def train(
    recipe: RecipeSource, resume: ResumeMode = "never", prepared: str | Path | None = None, dry_run: bool = False,
    reset: str | None = None, quiet: bool = False,
) -> RunResult:
    """Train the recipe in this process, as one of torchrun's or srun's, or in local ones; prepares missing data.

    `prepared` is a directory that `prepare_data` returned; `reset` names parts of a resumed run to reset, such as
    ``"schedule"``. Raises TunerError's children as `tuner train` reports them.
    """
    loaded = loaded_of(recipe)
    start = absolute(resume) if isinstance(resume, Path) else resume
    return _launched(loaded, start, None if prepared is None else absolute(prepared), dry_run, reset, quiet)


def resume(
    run: str | Path, overrides: Mapping[str, Any] | None = None, dry_run: bool = False, reset: str | None = None,
    quiet: bool = False,
) -> RunResult:
    """Resume a run from its newest valid checkpoint; a finished, whole one is returned as it is.

    `overrides` are keys that may change, such as ``{"train.stop_after": "100 steps"}``; `reset` allows more of them.
    """
    return _launched(resume_source(absolute(run, "all"), overrides_of(overrides)), "must", None, dry_run, reset, quiet)


def _launched(
    loaded: LoadedRecipe, start: ResumeMode, prepared: Path | None, dry_run: bool, reset: str | None, quiet: bool
) -> RunResult:
    level = level_of(loaded.recipe.logging.level, quiet)
    options = LaunchOptions(start, prepared, dry_run=dry_run, reset=parse_reset(reset), level=level)
    main = RankInfo.from_environment().is_main
    console = Console(main, level)
    with in_store(loaded, console, writes=not dry_run):
        status = status_of(loaded, options, console, hashes=main)
        if (finished := nothing_to_do(status, loaded.recipe.export)) is not None:
            return finished
        from tuner.run.launch import launch  # with torch, which a run that is done does without

        return launch(loaded, options, status=status)
