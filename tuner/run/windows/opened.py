"""The window that is trained: the one that a launch begins with, found and prepared before any process group exists,
and later ones, whose rows become the ones that are trained while the plan continues over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.data.building.spec import PrepareSpec
from tuner.data.prepared import open_prepared
from tuner.errors import DataError, RecipeError
from tuner.run.options import RunResult
from tuner.run.parts.part import Before
from tuner.run.status import RunStatus, run_result
from tuner.run.windows.finder import Finder, PreparedHere, prepared_window, waited
from tuner.rundir.windows import WindowEntry, WindowPosition, entries_of, read_windows, write_windows
from tuner.setup.build import Assembly, held_out_rows
from tuner.setup.portions import PortionPlans
from tuner.setup.probes import probes_of
from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import Progress


class WindowIsLateError(DataError):
    """The window that a launch is to begin with is not there, and was waited for long enough."""


def begin_windows(before: Before) -> WindowPosition | RunResult:
    """The window at which a launch begins, prepared, or the result of one that waited for it in vain.

    Raises RecipeError for options that windows do not have, and what `first_position` raises.
    """
    status, options = before.status, before.options
    if options.prepared is not None:
        raise RecipeError("--prepared is one directory, and data.windows has many", hint="leave it out")
    if "data" in options.reset:
        raise RecipeError(
            "--reset data: the windows of a run are its data, in their order",
            hint=f"train on from its weights: --name NEW-NAME --model.name_or_path {status.run.path}",
        )
    try:
        return first_position(before)
    except WindowIsLateError as error:
        saved = status.checkpoint
        if status.record is None or saved is None or options.dry_run:
            raise
        before.console.say("waiting", f"{error.message}; {error.hint}")
        return run_result(status.run, "stopped", saved, saved.step, saved.state)


def first_position(before: Before) -> WindowPosition:
    """The window at which a launch that resumes from a run's checkpoint begins, prepared; it is waited for.

    Raises WindowIsLateError where it does not come, DataError where it cannot be prepared or none is left to train on.
    """
    spec, status, recipe = before.spec, before.status, before.loaded.recipe
    entries, step = _noted(status), 0 if status.checkpoint is None else status.checkpoint.step
    done = _done(entries, step)
    preparation = PreparedHere(spec, before.console, only_found=before.options.no_prepare)
    passes = recipe.data.windows.passes_in(recipe.train.duration)
    finder = Finder(spec, preparation, entries[:done], entries[done:], passes=passes)
    wait = spec.data.windows.wait
    patience_s = 0.0 if wait is None or before.options.dry_run else wait.seconds
    with before.console.doing("looking for the next window") as doing:
        late = waited(finder.seen, patience_s, doing, lambda: False).found
    if late.kind == "stop":
        raise WindowIsLateError(late.words, hint="run the same command again when it is")
    if late.kind == "ended":
        return _ended(finder.entries)
    number, entry = len(finder.entries), late.entry
    if not finder.known:
        entry = replace(entry, first_step=step)
    return WindowPosition(finder.opened(entry), number)


def _noted(status: RunStatus) -> tuple[WindowEntry, ...]:
    """The windows that a run has opened or left out, or the one that its checkpoint comes from."""
    noted = () if status.record is None else read_windows(status.run.path)
    saved = () if status.checkpoint is None else entries_of(status.checkpoint.state.get("windows", ()))
    return max(noted, saved, key=len)


def _done(entries: Sequence[WindowEntry], step: int) -> int:
    """How many windows lie before the one that holds the step after `step`."""
    return next((i for i, entry in enumerate(entries) if not entry.left_out and entry.last_step > step), len(entries))


def _ended(entries: Sequence[WindowEntry]) -> WindowPosition:
    trained = [number for number, entry in enumerate(entries) if not entry.left_out]
    if not trained:
        why = ", ".join(f"{entry.name} ({entry.left_out})" for entry in entries[:3])
        raise DataError(f"no window has rows to train on: {why}", hint="see data.windows in the recipe")
    return WindowPosition(tuple(entries), trained[-1], ended=True)


@dataclass
class OpenedWindows:
    """The windows of a run as far as a launch is, on every rank."""

    spec: PrepareSpec
    position: WindowPosition
    rows: Prefetcher | None = field(default=None, init=False)
    """What takes the rows of the window at hand; there during the loop."""

    def as_state(self) -> list[dict[str, Any]]:
        """Their part of a checkpoint's JSON state: the window at hand is the last."""
        return [entry.as_state() for entry in self.position.decided]

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint at the end of the current window, though others follow."""
        return self.trained % self.spec.data.windows.save_every == 0

    @property
    def trained(self) -> int:
        """How many windows the run has trained, with the current one."""
        return sum(not entry.left_out for entry in self.position.decided)

    def write(self, run_dir: Path) -> None:
        """Note the windows in the run directory. Raises MachineError."""
        write_windows(run_dir, self.position.entries)

    def open(
        self, entry: WindowEntry, decided: tuple[WindowEntry, ...], assembly: Assembly, progress: Progress
    ) -> None:
        """Go over to a window that is prepared, after those that were `decided`: steps are its own from now on.

        Raises DataError where its rows are not those that the run had there before.
        """
        plans, first = PortionPlans(assembly.resolved), progress.step
        assert self.rows is not None
        prepared = open_prepared(prepared_window(self.spec, entry))
        rows, plan = prepared.train, plans.plan(len(prepared.train), first)
        opened = replace(entry, first_step=first, last_step=plan.total_steps)
        if entry.last_step and opened != entry:
            raise DataError(f"window {entry.name}: opened after step {entry.first_step} before, and after {first} now")
        self.position = WindowPosition((*decided, opened), len(decided))
        assembly.probes[:] = probes_of(assembly.resolved, rows)
        if assembly.held_out is not None:
            assembly.held_out.become(held_out_rows(self.spec.data, prepared), entry.name)
        progress.plan, progress.data_start = plan, first
        progress.more_to_come = may_follow(assembly, progress)
        progress.saves_last, progress.portions = self.is_saved, self.trained
        self.rows.go_over(rows, len(decided), first, plan.total_steps)


def may_follow(assembly: Assembly, progress: Progress) -> bool:
    """Whether a window may follow the one at hand: the run does not end with it by its duration."""
    limit = PortionPlans(assembly.resolved).limit
    return limit is None or progress.plan.total_steps < limit
