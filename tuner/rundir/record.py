"""Runs as they are read: their record, recipe, metrics and summary; and how they are removed. Needs no torch."""

from __future__ import annotations

import calendar
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.config.eval_tasks import EvalTask
from tuner.config.load import flatten
from tuner.config.yaml import Problems, read_yaml
from tuner.errors import DataError, RecipeError, counted
from tuner.rundir.checkpoints import any_valid, last_problem, last_state, last_step, synced_step, way_to_whole
from tuner.rundir.layout import CHECKPOINTS, LOCK, METRICS, RECORD, RESOLVED_RECIPE, require_no_links
from tuner.rundir.run_json import TIME_FORMAT, hold, is_run, other_contents, read_record
from tuner.runtime.files import TMP_PREFIX, TRASH_PREFIX, discard_dir, reading
from tuner.runtime.lock import is_locked
from tuner.stages import shown, url_of

MAX_DEPTH = 4
"""How deep below a directory runs are looked for."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run directory, with its record, or with what its checkpoints say where that is missing."""

    path: Path
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The launches, oldest first."""
        return list(self.record["launches"])

    @cached_property
    def status(self) -> str:
        """finished, stopped, failed, running, damaged, or killed: a launch that ended without writing how.

        Of a run of which only this was fetched from its store, a launch may run elsewhere.
        """
        said = str(self.record.get("status"))
        if said == "running" and (self._is_in_store or is_locked(self.path / LOCK)):
            return said
        if self.damage is not None:
            return "damaged"
        if said == "running":
            return "finished" if last_state(self.path / CHECKPOINTS, self.record).get("finished") else "killed"
        return said

    @cached_property
    def damage(self) -> str | None:
        """What is wrong with the last checkpoint by its manifest and sizes; its tensors are not read."""
        return None if self._is_in_store else last_problem(self.path / CHECKPOINTS, self.record)

    @property
    def _is_in_store(self) -> bool:
        """Whether its checkpoints are not here but in a store, where nothing can be torn."""
        return url_of(self.path) is not None and not step_dirs(self.path / CHECKPOINTS)

    @property
    def problems(self) -> list[str]:
        """What of the run is damaged or gone, a line each, with what to type."""
        found, line = [], self.latest.step
        if not (self.path / RECORD).is_file():
            found.append(f"{self.path / RECORD} is gone: tuner resume {self.path} writes it again")
        if self.status == "damaged":
            checkpoints = self.path / CHECKPOINTS
            way = way_to_whole(checkpoints, any_valid(checkpoints))
            found.append(f"{self.path}: its last checkpoint is not whole: {self.damage}; {way}")
        synced, ends = synced_step(self.path / CHECKPOINTS, self.record), 0 if line is None else line["step"]
        if synced > ends:
            found.append(f"{self.path / METRICS} ends at step {ends:,} of {synced:,}: its later lines are lost")
        return found

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, one level deep with dotted keys; empty where the run has none."""
        path = self.path / RESOLVED_RECIPE
        if not path.is_file():
            return {}
        problems = Problems()
        tree = read_yaml(path.read_text(encoding="utf-8"), path.name, self.path, problems).plain()
        if problems.found:
            raise DataError(f"{path}: not a readable recipe")
        return flatten(tree)

    def lines(self) -> Iterator[Line]:
        """The lines of metrics.jsonl in order; a last one that was cut short is left out. Raises DataError."""
        return (line for raw in self._raw_lines() if (line := _parsed(raw)) is not None)

    @cached_property
    def latest(self) -> Latest:
        """The newest step and the evaluations, without reading every line's numbers."""
        steps: deque[bytes] = deque(maxlen=2)  # the last one may be cut short
        evaluations: list[Line] = []
        for raw in self._raw_lines():
            if b'"train"' in raw:
                steps.append(raw)
            elif (line := _parsed(raw)) is not None and line.get("kind") == "eval":
                evaluations.append(line)
        whole = [line for raw in steps if (line := _parsed(raw)) is not None]
        return Latest(whole[-1] if whole else None, evaluations)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoint directories, valid or not, oldest first."""
        return [path for _, path in reversed(step_dirs(self.path / CHECKPOINTS))]

    @property
    def every_checkpoint(self) -> list[Path]:
        """The checkpoint directories, and the last one's where that is gone, oldest first."""
        last = last_step(self.path / CHECKPOINTS, self.record)
        known = {path: step for step, path in step_dirs(self.path / CHECKPOINTS)}
        if last is not None and not self._is_in_store:
            known.setdefault(self.path / CHECKPOINTS / step_name(last), last)
        return sorted(known, key=lambda path: known[path])

    @property
    def step(self) -> int:
        """Optimizer steps done, as far as they were written."""
        line = self.latest.step
        noted = (launch.get("step") for launch in self.launches) if line is None else (line["step"],)
        return max((int(step or 0) for step in noted), default=0)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None where no launch has noted them."""
        noted = [launch["total_steps"] for launch in self.launches if launch.get("total_steps")]
        return int(noted[-1]) if noted else None

    @property
    def seconds(self) -> float:
        """Time of all launches.

        One that runs counts to now; one that was killed to the last line that was written, or to the next launch.
        """
        launches = self.launches
        return sum(map(self._launch_seconds, launches, [*launches[1:], None]))

    def _launch_seconds(self, launch: Mapping[str, Any], following: Mapping[str, Any] | None) -> float:
        began, ended = _seconds(launch.get("started")), _seconds(launch.get("ended"))
        if began is None:
            return 0.0
        if ended is None and following is None and self.status == "running":
            ended = time.time()
        if ended is None:
            metrics = self.path / METRICS
            ended = metrics.stat().st_mtime if metrics.is_file() else began
            # The newest line may be a later launch's.
            begun_again = None if following is None else _seconds(following.get("started"))
            ended = ended if begun_again is None else min(ended, begun_again)
        return max(0.0, ended - began)

    def _raw_lines(self) -> Iterator[bytes]:
        path = self.path / METRICS
        if not path.is_file():
            return
        with reading(path), path.open("rb") as file:
            yield from file


class Latest(NamedTuple):
    """The newest line of a step, and every line of an evaluation."""

    step: Line | None
    evaluations: list[Line]

    @property
    def best(self) -> Line | None:
        """The evaluation with the lowest loss, the first of equals."""
        numbers = [line for line in self.evaluations if isinstance(line.get("loss"), (int, float))]
        return min(numbers, key=lambda line: float(line["loss"]), default=None)


def read_run(path: Path) -> Run:
    """Open a run directory. Raises RecipeError for a path that is none and DataError for a damaged record."""
    if not path.is_dir():
        raise RecipeError(f"{path}: no such directory", hint="give a run directory, such as tuner runs list shows")
    if not is_run(path):
        directory = path if next(_run_dirs(path, MAX_DEPTH), None) is not None else path.parent
        raise RecipeError(
            f"{shown(path)} is not a run: it has no {RECORD}", hint=f"see which there are: tuner runs list {directory}"
        )
    require_no_links(path)
    return Run(path, read_record(path))


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Open run directories, and a line about each that is left out because its launch never started a run.

    Raises what `read_run` raises for any other path that is no run, and where no run is left.
    """
    runs: list[Run] = []
    left_out: list[Path] = []
    for path in paths:
        if path.is_dir() and not is_run(path) and not other_contents(path):
            left_out.append(path)
        else:
            runs.append(read_run(path))
    if left_out and not runs:
        read_run(left_out[0])
    return runs, [f"{path} is left out: its launch never started" for path in left_out]


def find_runs(directory: Path) -> tuple[list[Run], list[str]]:
    """The runs at or below `directory`, oldest first, and a line about each that is damaged or cannot be read.

    Links are not followed, and nothing is looked for inside a run. Raises RecipeError where there is no such directory.
    """
    if not directory.is_dir():
        raise RecipeError(f"{directory}: no such directory", hint="name the directory that holds your runs")
    runs, damaged = [], []
    for path in _run_dirs(directory, MAX_DEPTH):
        try:
            require_no_links(path)
            runs.append(Run(path, read_record(path)))
            damaged += runs[-1].problems
        except DataError as error:
            damaged.append(error.message)
    return sorted(runs, key=lambda run: (started(run), str(run.path))), damaged


def started(run: Run) -> str:
    """When the first launch started, as it was written; empty where none did."""
    return str(run.launches[0].get("started", "")) if run.launches else ""


def _run_dirs(directory: Path, depth: int) -> Iterator[Path]:
    if is_run(directory):
        yield directory
        return
    if depth == 0:
        return
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith((TMP_PREFIX, TRASH_PREFIX)):
            yield from _run_dirs(directory / entry.name, depth - 1)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def _seconds(text: object) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(str(text), TIME_FORMAT))) if text else None
    except ValueError:
        return None


NOT_FIGURES = frozenset({"kind", "step", "loss", "eval_s", "samples_s", "tasks_s"})
"""What the line of an evaluation has that is no figure of the method."""
NAMES = frozenset({"name", "output_dir"})
"""Keys that differ between any two runs."""


def summary(run: Run) -> dict[str, Any]:
    """A run's figures as JSON values; None where it has none.

    `loss` is the newest step's; `eval_loss` the newest evaluation's, and `eval_figures` what it measured besides;
    `task_figures` are the newest ones of each task;
    `seconds` the time of all launches, start and evaluations included. `damage` is what is wrong with the last
    checkpoint by its manifest and sizes.
    """
    step, evaluations, best = run.latest.step or {}, run.latest.evaluations, run.latest.best
    return {
        "name": run.name, "path": str(run.path), "run_id": run.record.get("run_id"),
        "status": run.status, "damage": run.damage,
        "step": run.step, "total_steps": run.total_steps, "tokens": step.get("tokens"), "loss": step.get("loss"),
        "eval_loss": evaluations[-1].get("loss") if evaluations else None,
        "eval_figures": eval_figures(run), "task_figures": task_figures(run),
        "best_eval_loss": best["loss"] if best else None, "best_eval_step": best["step"] if best else None,
        "seconds": round(run.seconds, 1), "tok_per_s": step.get("tok_per_s"),
        "started": started(run), "launches": len(run.launches),
    }  # fmt: skip


def source_losses(run: Run) -> dict[str, float]:
    """The newest evaluation's loss of each source by name; empty where there is one source alone."""
    newest = run.latest.evaluations[-1] if run.latest.evaluations else {}
    return {key.removeprefix("loss/"): value for key, value in newest.items() if key.startswith("loss/")}


def eval_figures(run: Run) -> dict[str, float]:
    """What the newest evaluation measured besides the loss, by name; of all sources together."""
    newest = run.latest.evaluations[-1] if run.latest.evaluations else {}
    others = {name: value for name, value in newest.items() if name not in NOT_FIGURES and "/" not in name}
    return {name: float(value) for name, value in others.items() if isinstance(value, (int, float))}


def task_figures(run: Run) -> dict[str, dict[str, float]]:
    """The newest figures of each task by name; a task that was not scored in the last evaluation keeps its own."""
    tasks = run.recipe.get("eval.tasks")  # as plain values
    listed = tasks if isinstance(tasks, list) else []
    names = {EvalTask.model_validate(task).label for task in listed if isinstance(task, dict)}
    found: dict[str, dict[str, float]] = {}
    for line in run.latest.evaluations:
        for key, value in line.items():
            task, _, figure = key.partition("/")
            if task in names and figure and isinstance(value, (int, float)):
                found.setdefault(task, {})[figure] = float(value)
    return found


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys, in the recipes' order, whose values are not the same in all of them; names and places are left out."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [key for key in keys if key not in NAMES and any(each.get(key) != recipes[0].get(key) for each in recipes)]


def sources_of(meta: Mapping[str, Any]) -> list[str]:
    """A line for each place that a checkpoint's run began with weights of; none where it is its base model alone."""
    noted = meta.get("init_from")
    entries = noted.get("entries", ()) if isinstance(noted, Mapping) else ()
    return [_source_line(entry) for entry in entries]


def _source_line(entry: Mapping[str, Any]) -> str:
    step = "" if entry.get("step") is None else f", step {entry['step']}"
    digest = str(entry["sha256"])[:16]
    return f"{entry['kind']} {entry['path']}{step}: {counted(entry['tensors'], 'tensor')}, sha256 {digest}"


def remove_runs(paths: Sequence[Path]) -> list[Path]:
    """Remove run directories, all of them or, where one must not be, none; returns their paths.

    Raises RecipeError for a path that is no run, or a link to one; DataError for one whose record is damaged;
    MachineError for one that is in use, naming its holder.
    """
    unique = list(dict.fromkeys(paths))
    with ExitStack() as locks:
        for path in unique:
            if path.is_symlink():
                raise RecipeError(f"{path} is a link", hint=f"name the run itself: {path.resolve()}")
            read_run(path)
            locks.enter_context(hold(path))
        for path in unique:
            discard_dir(path)
    return unique
