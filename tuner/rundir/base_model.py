"""What `model.name_or_path` cannot be, though it is a directory with weights: a run, a checkpoint, or an adapter."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.errors import DataError, RecipeError
from tuner.rundir.last_checkpoint import last_step
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, export_dir
from tuner.rundir.run_json import is_run, read_record

KEY = "model.name_or_path"


def require_base_model(name: str, where: str) -> None:
    """Raise RecipeError for a run, a checkpoint or an adapter, with the way to train further from it.

    ``where`` says where the recipe names it. A hub name, a model directory and a path that is not there are left to
    whoever loads the model.
    """
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file():
        return
    from tuner.rundir.model_path import is_run_path

    if is_run_path(path):
        raise _is_a_run(path, where)
    if (path / "adapter_config.json").is_file():
        run = _shown(path.parent.parent) if path.parent.name == EXPORTS else "RUN"
        raise RecipeError(
            f"{where}  {KEY}: {_shown(path)} is an adapter alone, not a model",
            hint=f"export it merged into its base model: tuner export-hf {run}      then {KEY}: that directory",
        )


def _is_a_run(path: Path, where: str) -> RecipeError:
    is_checkpoint = path.parent.name == CHECKPOINTS
    run_dir = path.parent.parent if is_checkpoint else path
    step = int(path.name.removeprefix("step-")) if is_checkpoint else _last_step(run_dir)
    what = "a checkpoint" if is_checkpoint else "a run"
    message = f"{where}  {KEY}: {_shown(path)} is {what}, not a model"
    exported = _newest_export(run_dir) if not is_checkpoint else export_dir(run_dir, step or 0)
    if exported is not None and (exported / "config.json").is_file():
        return RecipeError(message, hint=f"take its export: {KEY}: {_shown(exported)}")
    if step is None:
        first, run = _way_to_save(run_dir), _shown(run_dir)
        hint = f"it has no checkpoint; {first} && tuner export-hf {run}      then {KEY}: that directory"
        return RecipeError(message, hint=hint)
    target = _shown(export_dir(run_dir, step))
    return RecipeError(message, hint=f"export it first: tuner export-hf {_shown(path)}      then {KEY}: {target}")


def _last_step(run_dir: Path) -> int | None:
    try:
        return last_step(run_dir / CHECKPOINTS, read_record(run_dir) if is_run(run_dir) else None)
    except DataError:
        there = step_dirs(run_dir / CHECKPOINTS)
        return there[0][0] if there else None


def _way_to_save(run_dir: Path) -> str:
    from tuner.rundir.model_path import way_to_save

    shown = Path(_shown(run_dir))
    with suppress(DataError):
        return way_to_save(shown, read_record(run_dir) if is_run(run_dir) else None)
    return way_to_save(shown, None)


def _newest_export(run_dir: Path) -> Path | None:
    """The newest export of a whole model, where it is that of the last checkpoint."""
    step = _last_step(run_dir)
    return None if step is None else run_dir / EXPORTS / step_name(step)


def _shown(path: Path) -> str:
    """A path as it is typed here: relative where that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
