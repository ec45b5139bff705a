"""What the path of a model is: a run, of which one checkpoint is meant, a checkpoint, or a Hugging Face directory; and
what `model.name_or_path` cannot be, though it is a directory with weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tuner.checkpoint.manifest import STEP, step_dirs, step_name
from tuner.checkpoint.open import CheckpointInfo, newest, open_checkpoint
from tuner.errors import DataError, RecipeError
from tuner.rundir.checkpoints import gone, last_step, way_to_whole
from tuner.rundir.layout import CHECKPOINTS, EXPORTS, export_dir, require_no_links
from tuner.rundir.run_json import is_run, read_record
from tuner.runtime.files import typed_path

Which = Literal["newest", "best"] | int
"""Of a run's checkpoints: the last one, the one with the lowest loss, or that of a step."""
Warn = Callable[[str], None]


def ignore_warning(text: str) -> None:
    """For a caller that shows no warnings, or has shown them before."""


@dataclass(frozen=True)
class RunCheckpoint:
    """A checkpoint and the run directory that it belongs to."""

    run_dir: Path
    checkpoint: CheckpointInfo

    @property
    def path(self) -> Path:
        """The checkpoint's directory."""
        return self.checkpoint.path


class HfDirectory(NamedTuple):
    """A Hugging Face directory, of a whole model or of an adapter alone."""

    path: Path
    is_adapter: bool


class HubModel(NamedTuple):
    """A whole model by its name on the hub, such as `owner/name`, in the hub's cache or to be fetched."""

    name: str

    @property
    def path(self) -> Path:
        """The name, in the place of a directory."""
        return Path(self.name)


def is_run_path(path: Path) -> bool:
    """Whether a path is a run directory or a checkpoint inside one."""
    if not path.is_dir():
        return False
    return path.absolute().parent.name == CHECKPOINTS or (path / CHECKPOINTS).is_dir() or is_run(path)


def resolve_model_path(
    path: Path, warn: Warn = ignore_warning, shards: bool = True, which: Which = "newest"
) -> RunCheckpoint | HfDirectory:
    """What a path given to export, eval or generate is; of a run, one checkpoint, as `find_checkpoint` finds it.

    Raises RecipeError for a path that is no model at all, and what `find_checkpoint` raises.
    """
    path = path.absolute()
    if not path.is_dir():
        raise RecipeError(f"{path}: no such directory", hint="give a run, a checkpoint or a Hugging Face directory")
    found = find_checkpoint(path, warn, shards, which)
    if found is not None:
        return found
    if (path / "adapter_config.json").is_file() or (path / "config.json").is_file():
        return HfDirectory(path, is_adapter=not (path / "config.json").is_file())
    raise RecipeError(
        f"{path}: neither a run, a checkpoint nor a Hugging Face directory",
        hint=f"a run holds {CHECKPOINTS}/; a checkpoint is RUN/{CHECKPOINTS}/step-N; a model directory has config.json",
    )


def find_checkpoint(path: Path, warn: Warn, shards: bool = True, which: Which = "newest") -> RunCheckpoint | None:
    """The checkpoint that `path` means, checked; None for a path that is neither a run nor a checkpoint of one.

    Without ``shards`` the tensors' files are not hashed: for a reader that checks each tensor as it reads it, and
    passes what it finds through `with_remedies`. `warn` gets damaged checkpoints beyond the last one, of a record
    that cannot be read, and of a run that is not finished. Raises DataError, with the ways on, where the checkpoint
    is damaged or gone, and RecipeError for a best one that was not kept.
    """
    path = path.absolute()
    if not is_run_path(path):
        return None
    require_no_links(path.parent.parent if path.parent.name == CHECKPOINTS else path)
    if path.parent.name == CHECKPOINTS:
        if which != "newest":
            raise RecipeError(f"{path}: is one checkpoint: --step chooses one of a run", hint="give the run directory")
        return RunCheckpoint(path.parent.parent, _open(path, shards))
    if isinstance(which, int):
        there = dict(step_dirs(path / CHECKPOINTS))
        if which not in there:
            names = ", ".join(step_name(step) for step in sorted(there)) or "none"
            raise DataError(gone(path / CHECKPOINTS, which), hint=f"there are: {names}")
        return RunCheckpoint(path, _open(there[which], shards))
    last = _last(path, warn, shards)
    step = _best_step(last) if which == "best" else last.step
    return RunCheckpoint(path, last if step == last.step else _open(path / CHECKPOINTS / step_name(step), shards))


def with_remedies(error: DataError, path: Path) -> DataError:
    """The error of a damaged checkpoint in directory `path` with the ways on, where it has no hint yet."""
    return DataError(error.message, hint=error.hint or _remedies(path))


def _open(path: Path, shards: bool) -> CheckpointInfo:
    try:
        return open_checkpoint(path, shards=shards)
    except DataError as error:
        raise with_remedies(error, path) from error


def _last(run_dir: Path, warn: Warn, shards: bool) -> CheckpointInfo:
    """The last checkpoint of a run. Raises DataError where it is not whole, and where there never was one."""
    checkpoints, record = run_dir / CHECKPOINTS, readable_record(run_dir, warn)
    last = last_step(checkpoints, record)
    if last is None:
        raise DataError(f"{run_dir}: the run has no checkpoint", hint=way_to_save(run_dir, record))
    problems: dict[int, str] = {last: gone(checkpoints, last)}
    for step, path in step_dirs(checkpoints):
        if step < last:
            break
        try:
            found = open_checkpoint(path, shards=shards)
        except DataError as error:
            problems[step] = error.message
            continue
        for number, problem in problems.items():
            if number > step:
                warn(f"{checkpoints / step_name(number)} is not used: {problem}")
        _tell_unfinished(run_dir, record, found, warn)
        return found
    raise DataError(
        f"{run_dir}: its last checkpoint is not whole: {problems[last]}", hint=_remedies(checkpoints / step_name(last))
    )


def readable_record(run_dir: Path, warn: Warn = ignore_warning) -> Mapping[str, Any] | None:
    """The run's record; None, and a warning, where it cannot be read: the checkpoints describe themselves."""
    if not is_run(run_dir):
        return None
    try:
        return read_record(run_dir)
    except DataError as error:
        warn(error.message)
        return None


def _tell_unfinished(run_dir: Path, record: Mapping[str, Any] | None, found: CheckpointInfo, warn: Warn) -> None:
    if found.state.get("finished") is not False:
        return
    totals = [launch.get("total_steps") for launch in (record or {}).get("launches", ())]
    total = next((total for total in reversed(totals) if isinstance(total, int)), None)
    if total is None or found.step < total:
        of = "" if total is None else f" of {total}"
        warn(f"{run_dir}: its newest checkpoint is that of step {found.step}{of}, before the end of the run")


def way_to_save(run_dir: Path, record: Mapping[str, Any] | None) -> str:
    """What gives a run without a checkpoint its first one, by its record."""
    from tuner.rundir.directory import RunDir  # which loads the recipe: help of commands that take a path does without

    is_finished = record is not None and record.get("status") == "finished"  # with checkpoint.at_end: false
    if not RunDir(run_dir).keeps_recipe(record):
        end = " --checkpoint.at_end true" if is_finished else ""
        return f"train it by its recipe's file, since its own copy is gone: tuner train RECIPE --resume must{end}"
    if is_finished:
        return f"train it again and save its end: tuner resume {run_dir} --checkpoint.at_end true"
    return f"train it first: tuner resume {run_dir}"


def _best_step(last: CheckpointInfo) -> int:
    """The step of the best evaluation that the last checkpoint knows of."""
    best = last.state.get("best")
    if not isinstance(best, Mapping) or type(best.get("step")) is not int:
        raise RecipeError(
            f"{last.path}: no best checkpoint is known", hint="the recipe's checkpoint.keep_best: eval/loss keeps it"
        )
    return int(best["step"])


def _remedies(path: Path) -> str | None:
    """What to type where the checkpoint in directory `path` is damaged or gone; None where nothing helps."""
    checkpoints = path.parent
    run_dir = checkpoints.parent
    match = STEP.fullmatch(path.name)
    if match is None or checkpoints.name != CHECKPOINTS:
        return None
    last = last_step(checkpoints, readable_record(run_dir))
    other = newest(checkpoints)
    ways = []
    if (last is None or int(match[1]) >= last) and is_run(run_dir):
        ways.append(way_to_whole(checkpoints, any_valid=other is not None))
    if other is not None:
        which = "take an earlier one" if other.step < int(match[1]) else "take another"
        ways.append(f"{which}: {other.path}")
    return "      ".join(ways) or None


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
