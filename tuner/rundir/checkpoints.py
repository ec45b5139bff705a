"""The checkpoints of a run and its exports: which one is the last, whether it is whole and of the same base model, and
which stay. Needs no torch.
"""

import fcntl
import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tuner.checkpoint.manifest import STATE_NAME, step_dirs, step_name
from tuner.checkpoint.open import CheckpointInfo, open_checkpoint
from tuner.errors import DataError
from tuner.rundir.layout import DAMAGED_CHECKPOINTS, LATEST, UNFINISHED_LINK
from tuner.runtime.files import discard_dir, fsync_dir, machine_errors, opened, read_json, reading


def last_step(checkpoints: Path, record: Mapping[str, Any] | None) -> int | None:
    """The step of the checkpoint that a run means by its last; None where none was ever saved.

    A launch that ended has noted the newest that it saved. After one that was killed it is the newest that is there,
    whole or not, and at least the one that the launch began with. `checkpoints` is the run's directory of them,
    `record` its `run.json`, None where that is gone.
    """
    launches = [] if record is None else record["launches"]
    newest = launches[-1] if launches else {}
    if "saved_step" in newest:
        return _step(newest["saved_step"])
    if newest.get("status") in ("finished", "stopped"):  # a record of a version that did not note it
        return _step(newest.get("step"))
    known = [step for step, _ in step_dirs(checkpoints)[:1]]
    began = _step(newest.get("from_step"))
    from_another_run = bool(launches) and launches[0].get("began_from") and began == launches[0].get("from_step")
    if began and not from_another_run:
        known.append(began)
    return max(known, default=None)


def synced_step(checkpoints: Path, record: Mapping[str, Any]) -> int:
    """The step up to which metrics.jsonl was on the disk: before the last checkpoint committed, or its launch ended."""
    newest = record["launches"][-1] if record["launches"] else {}
    ended = _step(newest.get("step")) if newest.get("status") in ("finished", "stopped") else None
    return max(last_step(checkpoints, record) or 0, ended or 0)


def last_problem(checkpoints: Path, record: Mapping[str, Any] | None) -> str | None:
    """What is wrong with a run's last checkpoint by its manifest, its files and their sizes; None where nothing is.

    No tensor is read: bits that changed inside a file are found by `tuner runs verify`, and by whoever loads it.
    """
    step = last_step(checkpoints, record)
    if step is None:
        return None
    path = dict(step_dirs(checkpoints)).get(step)
    return gone(checkpoints, step) if path is None else problem_of(path)


def last_state(checkpoints: Path, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """The state in a run's last checkpoint; empty where that cannot be read."""
    step = last_step(checkpoints, record)
    try:
        return {} if step is None else read_json(checkpoints / step_name(step) / STATE_NAME)
    except DataError:
        return {}


def problem_of(path: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest, its files and their sizes; None where nothing is."""
    try:
        open_checkpoint(path, verify=False)
    except DataError as error:
        return error.message
    return None


def any_valid(checkpoints: Path) -> bool:
    """Whether some checkpoint is whole by its manifest, its files and their sizes."""
    return any(problem_of(path) is None for _, path in step_dirs(checkpoints))


def way_to_whole(checkpoints: Path, any_valid: bool) -> str:
    """What to type where a run's last checkpoint is not whole: from what is valid, else from the run's beginning.

    `tuner resume` begins at step 0 only where there is no checkpoint at all: one that is damaged might be mended.
    """
    run_dir = checkpoints.parent
    if any_valid or not step_dirs(checkpoints):
        return f"make it whole: tuner resume {run_dir}"
    aside = run_dir / DAMAGED_CHECKPOINTS
    return f"none is valid; begin at step 0: mv {checkpoints} {aside} && tuner resume {run_dir}"


def gone(checkpoints: Path, step: int) -> str:
    """What to say of a checkpoint that is not there."""
    return f"{checkpoints / step_name(step)}: no such directory"


def _step(value: object) -> int | None:
    return value if type(value) is int else None


class CheckpointHold(ExitStack):
    """A shared `flock` on a checkpoint's directory, which keeps it from being pruned while its run continues.

    It ends with its context, when it is closed, or with its process. Raises DataError where the directory is not there.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        with reading(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.callback(os.close, descriptor)
        with suppress(OSError):  # a file system without locks: pruning finds no lock, either
            fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Whether somebody on this machine, this process included, has a lock on a directory: reads it, or writes it."""
    with suppress(OSError), opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def prune(checkpoints_dir: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Keep the newest `keep` valid ones and those in `protect`; returns what was removed, newest first.

    Call it after a newer one is durable, on one rank. Each is renamed to a trash name before it is deleted; one that is
    being read waits for a later call. One that is invalid counts for nothing: it stays while it is newer than the
    oldest kept one, for people to look at. Raises MachineError.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    untouchable = {path.resolve() for path in protect}
    removed: list[Path] = []
    kept = 0
    for _, path in step_dirs(checkpoints_dir):
        if kept < keep:
            kept += problem_of(path) is None
        elif path.resolve() not in untouchable and not is_held(path):
            discard_dir(path)
            removed.append(path)
    return removed


LINEAGE = "tuner.json"
"""What an export says of its origin."""
APART = "adapter_apart"
"""Of a checkpoint's facts: its adapter shares its weight with another layer, so that it cannot be merged."""


def link_latest(directory: Path, name: str) -> None:
    """Have the link `latest` in a directory point to `name`; a reader finds the old or the new export, never none.

    Raises MachineError.
    """
    link = directory / LATEST
    fresh = directory / f"{UNFINISHED_LINK}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with machine_errors(link):
            for left in directory.glob(f"{UNFINISHED_LINK}*"):  # by one that was killed
                if not Path("/proc", left.name.removeprefix(UNFINISHED_LINK).partition("-")[0]).exists():
                    left.unlink(missing_ok=True)
            os.symlink(name, fresh)
            os.rename(fresh, link)
            fsync_dir(directory)
    finally:
        fresh.unlink(missing_ok=True)


def version_dirs(directory: Path) -> list[tuple[int, Path]]:
    """The `step-N` of a directory of models, newest first, each with its N; links are passed over."""
    return step_dirs(directory)


def is_export(path: Path, step: int, options: Mapping[str, Any]) -> bool:
    """Whether a directory is a published export of this step with these options, by its `tuner.json`."""
    try:
        facts = read_json(path / LINEAGE)
    except DataError:
        return False
    source = facts.get("source")
    return has_options(facts, options) and isinstance(source, Mapping) and source.get("step") == step


def has_options(facts: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether an export was made with these options, by its `tuner.json`; for `auto` with the type that it takes."""
    taken = facts.get("auto_dtype", "bf16") if options["dtype"] == "auto" else options["dtype"]
    return facts.get("export") == {**options, "dtype": taken}


def newest_export(directory: Path, options: Mapping[str, Any]) -> int:
    """The newest step exported with these options; -1 without any."""
    return max((step for step, path in step_dirs(directory) if is_export(path, step, options)), default=-1)


def prune_exports(directory: Path, keep: int, options: Mapping[str, Any]) -> None:
    """Keep the newest exports with these options; others, and the one that `latest` leads to, are not touched.

    Raises MachineError.
    """
    link = directory / LATEST
    latest = os.readlink(link) if link.is_symlink() else None
    made = [path for step, path in step_dirs(directory) if is_export(path, step, options)]
    for path in made[keep:]:
        if path.name != latest:
            discard_dir(path)


def require_same_base(info: CheckpointInfo, frozen_hash: str | None) -> None:
    """Check that the weights that were not trained are still those of the checkpoint's run. Raises DataError."""
    noted = info.meta.get("frozen_hash")
    if noted != frozen_hash:
        given = (info.meta.get("init_from") or {}).get("entries", ())
        raise DataError(
            f"{info.path}: the base model changed since this checkpoint was saved ({noted} -> {frozen_hash})",
            hint="restore it, or name its commit: model.revision"
            + (f"; or restore what model.init_from gave: {', '.join(one['path'] for one in given)}" if given else ""),
        )


def require_same_quantizer(info: CheckpointInfo, quantizer: Mapping[str, Any] | None) -> None:
    """Check that what made codes of the base is what did so in the checkpoint's run. Raises DataError."""
    noted = info.meta.get("quantizer")
    if noted != quantizer:
        raise DataError(
            f"{info.path}: the base was quantised otherwise when this checkpoint was saved ({noted} -> {quantizer})",
            hint="take the version of tuner that saved it, or start a new run with --name",
        )
