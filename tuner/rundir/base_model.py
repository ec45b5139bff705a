"""What `model.name_or_path` cannot be, though it is a directory with weights: a run, a checkpoint, or an adapter."""

from pathlib import Path

from tuner.errors import RecipeError
from tuner.rundir.last_checkpoint import last_step
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, export_dir
from tuner.rundir.model_path import is_run_path, readable_record, way_to_save
from tuner.runtime.files import typed_path

KEY = "model.name_or_path"


def require_base_model(name: str, where: str) -> None:
    """Raise RecipeError for a run, a checkpoint or an adapter, with the way to train further from it.

    ``where`` says where the recipe names it. A hub name, a model directory and a path that is not there are left to
    whoever loads the model.
    """
    path = Path(name)
    if not path.is_dir() or (path / "config.json").is_file():
        return
    if is_run_path(path):
        raise _is_a_run(path, where)
    if (path / "adapter_config.json").is_file():
        run = typed_path(path.parent.parent) if path.parent.name == EXPORTS else "RUN"
        raise RecipeError(
            f"{where}  {KEY}: {typed_path(path)} is an adapter alone, not a model",
            hint=f"export it merged into its base model: tuner export-hf {run}      then {KEY}: that directory",
        )


def _is_a_run(path: Path, where: str) -> RecipeError:
    is_checkpoint = path.parent.name == CHECKPOINTS
    run_dir = path.parent.parent if is_checkpoint else path
    record = readable_record(run_dir)
    step = int(path.name.removeprefix("step-")) if is_checkpoint else last_step(run_dir / CHECKPOINTS, record)
    what = "a checkpoint" if is_checkpoint else "a run"
    message = f"{where}  {KEY}: {typed_path(path)} is {what}, not a model"
    if step is None:
        first, run = way_to_save(Path(typed_path(run_dir)), record), typed_path(run_dir)
        hint = f"it has no checkpoint; {first} && tuner export-hf {run}      then {KEY}: that directory"
        return RecipeError(message, hint=hint)
    exported = export_dir(run_dir, step)
    target = typed_path(exported)
    if (exported / "config.json").is_file():
        return RecipeError(message, hint=f"take its export: {KEY}: {target}")
    return RecipeError(message, hint=f"export it first: tuner export-hf {typed_path(path)}      then {KEY}: {target}")
