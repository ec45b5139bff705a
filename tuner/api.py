"""The Python API: the functions that the commands call, given a recipe as a file, a shipped name or a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.numbers import parse_bytes
from tuner.runtime.openmp import limit_spinning

if TYPE_CHECKING:
    from tuner.data.building.prepare import PreparedInfo
    from tuner.export.hf import ExportReport
    from tuner.run.options import RunResult

__all__ = ["RecipeSource", "export_hf", "load_recipe", "prepare_data", "train"]

RecipeSource = LoadedRecipe | Path | str | Mapping[str, Any]
"""A loaded recipe, a file's path, a shipped recipe's name, or a mapping with the recipe's keys."""


def prepare_data(recipe: RecipeSource) -> PreparedInfo:
    """Prepare the recipe's data, or find it prepared; progress goes to stderr.

    Raises RecipeError, DataError and MachineError as `tuner prepare-data` reports them.
    """
    from tuner.data.building.prepare import prepare
    from tuner.data.building.spec import prepare_spec
    from tuner.runtime.console import Console

    found = _loaded(recipe).recipe
    spec = prepare_spec(found.model, found.tokenizer, found.data, found.method, found.seed)
    return prepare(spec, Console(level=found.logging.level))


def train(
    recipe: RecipeSource,
    resume: Literal["auto", "must", "never"] | Path = "never",
    prepared: str | Path | None = None,
    dry_run: bool = False,
) -> RunResult:
    """Train the recipe in this process, as one of torchrun's or srun's, or in local ones; prepares missing data.

    `prepared` is a directory that `prepare_data` returned. Raises TunerError's children as `tuner train` reports them.
    """
    limit_spinning(os.environ)  # before torch is imported
    from tuner.run.launch import launch
    from tuner.run.options import LaunchOptions

    loaded = _loaded(recipe)
    start = _path(resume) if isinstance(resume, Path) else resume
    level = loaded.recipe.logging.level
    options = LaunchOptions(start, None if prepared is None else _path(prepared), dry_run=dry_run, level=level)
    return launch(loaded, options)


def export_hf(
    path: str | Path,
    output: str | Path | None = None,
    dtype: Literal["bf16", "fp32"] = "bf16",
    adapter: Literal["merge", "keep"] = "merge",
    shard_size: str | int = "5GB",
    step: int | Literal["newest", "best"] = "newest",
    base_model: str | None = None,
) -> ExportReport:
    """Write a checkpoint of a run, or the checkpoint given, to `output` (default `<run>/exports/step-N`), verified.

    The same checkpoint and options give the same bytes; a target that holds them already is left alone. Raises
    RecipeError for a target that holds something else, DataError for a corrupt checkpoint, MachineError for a full
    disk and VerificationError, with nothing published, where the export is not the trained model.
    """
    from tuner.export.hf import ExportOptions, plan_export, run_export

    target = None if output is None else _path(output)
    options = ExportOptions(dtype, adapter, parse_bytes(shard_size), base_model)
    return run_export(plan_export(_path(path), target, options, step=step))


def _loaded(recipe: RecipeSource) -> LoadedRecipe:
    from tuner.rundir.base_model import require_base_model

    loaded = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)
    require_base_model(loaded.recipe.model.name_or_path, loaded.origins.get("model.name_or_path", "recipe"))
    return loaded


def _path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))
