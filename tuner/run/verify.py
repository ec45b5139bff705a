"""Proof that a run resumes exactly: some of its steps without a break, and the same ones with a stop between them."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tuner.checkpoint.load import content_sha256, read_tensors
from tuner.checkpoint.manifest import step_dirs
from tuner.checkpoint.open import CheckpointInfo, newest, open_checkpoint
from tuner.config.load import LoadedRecipe, load_recipe, recipe_dict
from tuner.errors import DataError, RecipeError, VerificationError, counted
from tuner.run.changes import resets_of
from tuner.run.launch import launch
from tuner.run.options import LaunchOptions, Resume
from tuner.run.status import branch_source, resume_source
from tuner.rundir.directory import RunDir
from tuner.rundir.layout import BANK, CHECKPOINTS, METRICS, TEACHERS
from tuner.rundir.run_json import hold
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import TMP_PREFIX, scratch_dir, sweep
from tuner.train.progress import CLOCKED

QUIET: dict[str, dict[str, Any]] = {
    "checkpoint": {"every": "never", "at_end": True, "keep_best": None, "marks": []},
    "eval": {"every": "never", "at_start": False, "at_end": False, "tasks": []},
    "export": {"every": "never", "at_end": False},
    "logging": {"trackers": [], "level": "warning"},
}
"""Nothing but steps and the last checkpoint: no evaluations, exports, trackers or checkpoints between."""


@dataclass(frozen=True)
class ResumeProof:
    """What was found equal: the steps after `from_step`, and the hash of the tensors after the last of them."""

    run_dir: Path
    from_step: int
    steps: int
    tensors: int
    sha256: str


def verify_resume(run_dir: Path, steps: int, console: Console, own_process: bool = True) -> ResumeProof:
    """Train ``2 * steps`` steps of a run without a break, and with a stop and a resume after ``steps`` of them.

    Both begin at the newest valid checkpoint with that many steps after it, else at the run's beginning, in a temporary
    directory next to the checkpoints; the run itself is only read, and locked meanwhile. ``own_process`` gives every
    launch processes of its own. A run on CUDA is compared with deterministic kernels, whatever its recipe says: by
    default flash attention adds gradients up in no fixed order there. Raises VerificationError with the first
    difference in the log, the state or the tensors.
    """
    if RankInfo.is_given():
        said = "verify-resume starts its processes itself"
        raise RecipeError(said, hint="run it without torchrun or srun; parallel.processes counts")
    loaded, run = resume_source(run_dir), RunDir(run_dir.absolute())
    with hold(run.path):
        run.checkpoints.mkdir(exist_ok=True)
        sweep(run.checkpoints)
        first, start = _start(run, steps, console)
        last = first + 2 * steps
        compared = f"steps {first + 1} to {last} of {run.path}, without a break and with one"
        asked, on_cuda = loaded.recipe.train.deterministic, is_made_deterministic(loaded.recipe.train.device)
        added = on_cuda and not asked
        console.say("verify", compared + (", with train.deterministic: true" if added else ""))
        with scratch_dir(f"{TMP_PREFIX}verify-", run.checkpoints) as place:
            with console.doing("training without a break"):
                whole = _Trained(loaded, place / "whole", console, own_process, run.path)
                whole.train(start, 2 * steps, last)
            with console.doing("training up to the break"):
                broken = _Trained(loaded, place / "broken", console, own_process, whole.path)
                broken.train(start, steps, last - steps)
            with console.doing("training after the break"):
                broken.train("must", steps, last)
            hint = _hint(on_cuda or asked)
            return _compared(run.path, first, whole, broken, hint)


def is_made_deterministic(device: str) -> bool:
    """Whether a run on a device is compared with deterministic kernels: CUDA's others do not give equal bits twice."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _hint(is_deterministic: bool) -> str:
    """What may cause a difference; kernels only where they were not the deterministic ones."""
    if is_deterministic:
        return "code of your own that keeps state (a method, an optimizer, a schedule)?"
    return "code of your own that keeps state, or kernels that are not deterministic? try train.deterministic: true"


def _start(run: RunDir, steps: int, console: Console) -> tuple[int, Resume]:
    """Where the compared steps begin, after which one: a checkpoint, or the run's beginning."""
    record = run.read_record()
    assert record is not None
    total = max((int(entry["total_steps"]) for entry in record["launches"] if entry.get("total_steps")), default=0)
    origin = branch_source(record)
    for path in [*(path for _, path in step_dirs(run.checkpoints)), *([] if origin is None else [origin])]:
        try:
            found = open_checkpoint(path)
        except DataError as error:
            console.warn(f"{path} is not used: {error.message}")
            continue
        if resets_of(found.state) == resets_of(record) and found.step + 2 * steps <= total:
            return found.step, path
    if origin is not None or 2 * steps > total or resets_of(record):
        raise RecipeError(
            f"{run.path}: fewer than {2 * steps} steps are left to compare after every checkpoint and from the start",
            hint="ask for fewer: --steps 1",
        )
    return 0, "never"


class _Trained:
    """A run in a directory of its own with the recipe of another one, launch by launch.

    It takes the versions of other models that the run ``like`` took, whatever newer ones there are by now.
    """

    def __init__(self, loaded: LoadedRecipe, directory: Path, console: Console, own_process: bool, like: Path) -> None:
        self.path = directory
        directory.mkdir()
        for path in filter(Path.is_file, (like / TEACHERS, like / BANK)):
            shutil.copy(path, directory)
        self._loaded, self._console, self._own_process = loaded, console, own_process

    def train(self, resume: Resume, steps: int, last: int) -> None:
        """Take so many steps, the last of which is `last`. Raises KeyboardInterrupt where a signal came between."""
        plain = recipe_dict(self._loaded.recipe)
        for section, values in QUIET.items():
            plain[section] = {**plain[section], **values}
        plain["train"] = {**plain["train"], "stop_after": f"{steps} steps"}
        if is_made_deterministic(self._loaded.recipe.train.device):
            plain["train"]["deterministic"] = True
        plain |= {"output_dir": str(self.path), "name": self.path.name, "hooks": []}
        quiet = replace(self._loaded, recipe=load_recipe(plain).recipe)
        result = launch(quiet, LaunchOptions(resume, level="warning"), own_process=self._own_process)
        if result.step != last:
            raise KeyboardInterrupt

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Those that it left, without what the clock said."""
        lines = [json.loads(line) for line in (self.path / METRICS).read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in CLOCKED} for line in lines]

    @cached_property
    def checkpoint(self) -> CheckpointInfo:
        """The last one that it left."""
        found = newest(self.path / CHECKPOINTS)
        assert found is not None
        return found


def _compared(run_dir: Path, first: int, whole: _Trained, broken: _Trained, hint: str) -> ResumeProof:
    if (difference := next(_differences(whole, broken), None)) is not None:
        said = f"{run_dir}: steps with a stop between them are not the steps without: {difference}"
        raise VerificationError(said, hint=hint)
    info = whole.checkpoint
    return ResumeProof(run_dir, first, len(whole.lines), len(info.index()), content_sha256(info))


def _differences(whole: _Trained, broken: _Trained) -> Iterator[str]:
    """In words: of the log, then of the JSON state, then of tensors, each in its order."""
    if len(whole.lines) != len(broken.lines):
        yield f"{counted(len(whole.lines), 'line')} in the log, {len(broken.lines)} with a stop"
    for before, after in zip(whole.lines, broken.lines, strict=False):
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                yield f"step {before['step']}: {key} {before.get(key)}, {after.get(key)} with a stop"
    one, other = whole.checkpoint, broken.checkpoint
    for key in sorted(one.state.keys() | other.state.keys()):
        if one.state.get(key) != other.state.get(key):
            yield f"state after step {one.step}: {key} {one.state.get(key)}, {other.state.get(key)} with a stop"
    if one.index().keys() != other.index().keys():
        yield f"{counted(len(one.index()), 'tensor')}, {len(other.index())} with a stop"
        return
    for (name, tensor), (_, same) in zip(read_tensors(one), read_tensors(other), strict=True):
        if not torch.equal(_bits(tensor), _bits(same)):
            yield f"{name} after step {one.step}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, so that not-a-number equals itself and zero is not minus zero."""
    return tensor.flatten().view(torch.uint8)
