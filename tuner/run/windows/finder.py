"""Which window is next: those that a run has noted first, then what lies in its sources, each prepared when found: here
or next to training; and the window that is trained, from the one that a launch begins with on.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from tuner.config.portions import Late, Portion
from tuner.data.building.cache import cache_path, valid
from tuner.data.building.prepare import find_prepared, prepare
from tuner.data.building.spec import PrepareSpec
from tuner.data.prepared import open_prepared
from tuner.data.sources import next_portion
from tuner.errors import DataError, MachineError, NoRowsError, RecipeError, TunerError, rebuilt
from tuner.run.options import RunResult
from tuner.run.parts.part import LaunchRequest
from tuner.run.status import RunStatus, run_result
from tuner.rundir.windows import LeftOut, WindowEntry, WindowPosition, entries_of, read_windows, write_windows
from tuner.runtime.console import Console, Updates
from tuner.setup.build import Assembly, held_out_rows
from tuner.setup.probes import probes_of
from tuner.setup.timetable import PortionPlans
from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import Progress


@dataclass(frozen=True)
class PreparedWindow:
    """What came of a window: the key of its prepared data and its rows; no key where it has none."""

    key: str = ""
    rows: int = 0
    warnings: tuple[str, ...] = ()


class Preparation(Protocol):
    """Prepares one window at a time."""

    def start(self, window: Portion) -> None:
        """Begin with a window."""

    def outcome(self) -> PreparedWindow | None:
        """What came of it; None while it is being prepared. Raises TunerError children."""

    def end(self) -> None:
        """Leave what is being prepared."""


@dataclass
class PreparedHere:
    """Prepares in this process, at once."""

    spec: PrepareSpec
    console: Console
    only_found: bool = False
    """Whether it must have been prepared before."""
    _window: Portion | None = None

    def start(self, window: Portion) -> None:
        """Keep it for `outcome`."""
        self._window = window

    def outcome(self) -> PreparedWindow:
        """Prepare it now. Raises DataError for rows that cannot be used, MachineError."""
        spec = replace(self.spec, portion=self._window)
        if self.only_found and find_prepared(spec) is None:
            raise DataError("it is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
        try:
            info = prepare(spec, self.console)
        except NoRowsError:
            return PreparedWindow()
        return PreparedWindow(info.key, len(open_prepared(info.path).train), info.warnings)

    def end(self) -> None:
        """Nothing is under way."""


@dataclass
class PreparedBeside:
    """Prepares in a process of its own, which training goes before; what it says is in a log of the run."""

    recipe: Mapping[str, Any]
    """As plain values."""
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, window: Portion) -> None:
        """Start the process. Raises MachineError."""
        job = {"recipe": dict(self.recipe), "window": {"name": window.name, "files": list(window.files)}}
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tuner.run.windows.worker"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,  # Ctrl-C at the terminal is training's to heed
                )
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(json.dumps(job).encode())
        except OSError as error:
            raise MachineError(f"the next window cannot be prepared: {error.strerror or error}") from error

    def outcome(self) -> PreparedWindow | None:
        """What the process wrote, once it has ended. Raises its error, MachineError where it was killed."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        self._process = None
        assert process.stdout is not None
        with process.stdout as out:
            said = out.read()
        try:
            answer = json.loads(said)
        except ValueError:
            message = f"preparing a window ended with code {process.returncode} and said nothing"
            raise MachineError(message, hint=f"its log: {self.log}") from None
        return _read(answer)

    def end(self) -> None:
        """End the process: what it has published stays, and the next builder removes the rest."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(OSError):
            process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def prepared_window(spec: PrepareSpec, entry: WindowEntry) -> Path:
    """The directory of a window's prepared data."""
    return cache_path(spec.cache_dir, "prepared", entry.key)


def _read(answer: Mapping[str, Any]) -> PreparedWindow:
    if "error" in answer:
        error = answer["error"]
        known: TunerError = rebuilt(error["type"], error["message"], error["hint"], error["exit_code"])
        raise known
    if "empty" in answer:
        return PreparedWindow()
    return PreparedWindow(answer["key"], int(answer["rows"]), tuple(answer["warnings"]))


POLL_S = 0.1
"""Time between two looks for a window that training waits for."""
Stamps = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Found:
    """What is known of the next window.

    ready: `entry` can be opened. preparing: it is there. late: it is not there, or has no row yet. stop: it was waited
    for long enough. ended: there is no other one.
    """

    kind: Literal["ready", "preparing", "late", "stop", "ended"]
    words: str = ""
    entry: WindowEntry = WindowEntry("")


@dataclass(frozen=True)
class WindowLook:
    """What was found, with the windows that were opened or left out by then."""

    found: Found
    entries: tuple[WindowEntry, ...]


def waited(
    look: Callable[[bool], WindowLook], patience_s: float, doing: Updates, is_stopping: Callable[[], bool]
) -> WindowLook:
    """Look until the next window is ready, there is none, it was waited for long enough, or the launch is stopping."""
    since, decided = time.monotonic(), -1
    while True:
        seen = look(time.monotonic() - since >= patience_s)
        if seen.found.kind not in ("late", "preparing"):
            return seen
        if is_stopping():
            return replace(seen, found=replace(seen.found, kind="stop"))
        if seen.found.kind == "preparing" or len(seen.entries) != decided:
            since, decided = time.monotonic(), len(seen.entries)  # the next one is waited for as long
        doing.update(seen.found.words)
        time.sleep(POLL_S)


class Finder:
    """Looks for the window after those in ``entries``; ``known`` ones come first, as they were.

    ``note`` is called with all entries whenever one is left out. The windows come in so many ``passes``; None: again
    and again. Not collective: rank 0 looks for all.
    """

    def __init__(
        self, spec: PrepareSpec, preparation: Preparation, entries: Sequence[WindowEntry],
        known: Sequence[WindowEntry] = (), note: Callable[[Sequence[WindowEntry]], None] = lambda entries: None, *,
        passes: int | None = 1,
    ) -> None:
        self.entries, self.known = list(entries), list(known)
        """Windows that were opened or left out so far; those of a launch that had come further."""
        self._spec, self._windows = spec, spec.data.windows
        self._preparation, self._note, self._passes = preparation, note, passes
        self._under_way: Portion | None = None
        self._stamps: Stamps = ()
        self._unusable: dict[tuple[Portion, Stamps], TunerError | None] = {}
        """Windows that have no rows, or that cannot be prepared, as long as their files stay as they are."""
        self._ready: WindowEntry | None = None

    def look(self, overdue: bool = False) -> Found:
        """What is known by now; begins to prepare what is found. ``overdue``: what is late was waited for long enough.

        Raises the error of a window that cannot be prepared, as long as its files stay as they are.
        """
        while self._ready is None:
            if self._under_way is None:
                decided = len(self.entries)
                if (found := self._begin(overdue)) is not None:
                    return found
                overdue = overdue and len(self.entries) == decided  # the next one is waited for as long
                continue
            window = self._under_way
            if (outcome := self._outcome(window)) is None:
                return Found("preparing", f"window {window.name} is being prepared")
            self._under_way = None
            if outcome.key:
                self._ready = self._entry(window, outcome)
            elif self._windows.empty == "skip":
                self._leave_out(window, "empty")
            else:
                self._unusable[window, self._stamps] = None
        return Found("ready", entry=self._ready)

    def seen(self, overdue: bool) -> WindowLook:
        """The same, with all that was decided by then."""
        return WindowLook(self.look(overdue), tuple(self.entries))

    def opened(self, entry: WindowEntry) -> tuple[WindowEntry, ...]:
        """The window that was ready is opened, as this entry: look for the one after it. Returns all entries."""
        if self.known:
            self.known.pop(0)
        self.entries.append(entry)
        self._ready = None
        return (*self.entries, *self.known)

    def end(self) -> None:
        """Leave what is being prepared."""
        self._preparation.end()

    def _begin(self, overdue: bool) -> Found | None:
        """Begin with the next window; what is to be said where there is none to begin with."""
        while self.known and self.known[0].left_out:
            self.entries.append(self.known.pop(0))
        if (window := self._next()) is None:
            return Found("ended")
        if isinstance(window, Late):
            return self._late(Portion(window.name, ()), window.missing, overdue)
        self._stamps = _stamps(window)
        if (window, self._stamps) in self._unusable:
            if (error := self._unusable[window, self._stamps]) is not None:
                raise error
            if self._windows.empty == "refuse":
                said = f"window {window.name}: {', '.join(window.files[:3])}: no rows"
                raise DataError(said, hint="put its rows there, or write data.windows.empty: skip or wait")
            return self._late(window, "no rows", overdue)
        if self.known and valid(cache_path(self._spec.cache_dir, "prepared", self.known[0].key), "prepared"):
            self._ready = self.known[0]  # whatever became of its files: it is trained as it was
            return None
        self._under_way = window
        self._preparation.start(window)
        return None

    def _next(self) -> Portion | Late | None:
        if self.known:
            return Portion(self.known[0].name, self.known[0].files)
        if self._passes is None and self._was_all_left_out():  # it would be looked for without an end
            return None
        return next_portion(self._spec.data, [Portion(each.name, each.files) for each in self.entries], self._passes)

    def _was_all_left_out(self) -> bool:
        """Whether a window was left out twice since the last one that was opened."""
        left_out = [entry.name for entry in takewhile(lambda entry: entry.left_out, reversed(self.entries))]
        return len(set(left_out)) < len(left_out)

    def _late(self, window: Portion, missing: str, overdue: bool) -> Found | None:
        if not overdue:
            return Found("late", f"window {window.name} is not there yet ({missing})")
        if self._windows.late == "skip":
            self._leave_out(window, "late")
            return None
        return Found("stop", f"window {window.name} is not there ({missing})")

    def _leave_out(self, window: Portion, why: LeftOut) -> None:
        self.entries.append(WindowEntry(window.name, window.files, why))
        self._note((*self.entries, *self.known))

    def _outcome(self, window: Portion) -> PreparedWindow | None:
        try:
            return self._preparation.outcome()
        except TunerError as error:
            self._under_way = None
            error.message = f"window {window.name}: {error.message}"
            error.args = (error.message,)
            self._unusable[window, self._stamps] = error
            raise

    def _entry(self, window: Portion, outcome: PreparedWindow) -> WindowEntry:
        if not self.known:
            return WindowEntry(window.name, window.files, key=outcome.key, rows=outcome.rows)
        entry = self.known[0]
        if entry.key != outcome.key:
            said = f"window {window.name}: its files changed since it was opened ({entry.key} -> {outcome.key})"
            raise DataError(said, hint="restore them, or start another run: --name NEW-NAME")
        return entry


def _stamps(window: Portion) -> Stamps:
    """What the files of a window are like: those that were repaired are other ones."""
    return tuple(_stamp(Path(file)) for file in window.files)


def _stamp(path: Path) -> tuple[int, ...] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return None


def begin_windows(request: LaunchRequest) -> WindowPosition | RunResult:
    """The window at which a launch that resumes from a run's checkpoint begins, prepared; it is waited for.

    Where it does not come, the result of a launch that has a checkpoint, else DataError; that also where it cannot be
    prepared or none is left to train on. Raises RecipeError for options that windows do not have.
    """
    spec, status, options, recipe = request.spec, request.status, request.options, request.loaded.recipe
    if options.prepared is not None:
        raise RecipeError("--prepared is one directory, and data.windows has many", hint="leave it out")
    if "data" in options.reset:
        raise RecipeError(
            "--reset data: the windows of a run are its data, in their order",
            hint=f"train on from its weights: --name NEW-NAME --model.name_or_path {status.run.path}",
        )
    saved, entries = status.checkpoint, _noted(status)
    step = 0 if saved is None else saved.step
    done = _done(entries, step)
    preparation = PreparedHere(spec, request.console, only_found=options.no_prepare)
    passes = recipe.data.windows.passes_in(recipe.train.duration)
    finder = Finder(spec, preparation, entries[:done], entries[done:], passes=passes)
    wait = spec.data.windows.wait
    patience_s = 0.0 if wait is None or options.dry_run else wait.seconds
    with request.console.doing("looking for the next window") as doing:
        found = waited(finder.seen, patience_s, doing, lambda: False).found
    if found.kind == "stop":
        way = "run the same command again when it is"
        if status.record is None or saved is None or options.dry_run:
            raise DataError(found.words, hint=way)
        request.console.say("waiting", f"{found.words}; {way}")
        return run_result(status.run, "stopped", saved, saved.step, saved.state)
    if found.kind == "ended":
        return _ended(finder.entries)
    number, entry = len(finder.entries), found.entry
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
    if not (trained := [number for number, entry in enumerate(entries) if not entry.left_out]):
        why = ", ".join(f"{entry.name} ({entry.left_out})" for entry in entries[:3])
        raise DataError(f"no window has rows to train on: {why}", hint="see data.windows in the recipe")
    return WindowPosition(tuple(entries), trained[-1], ended=True)


@dataclass
class OpenedWindows:
    """The windows of a run as far as a launch is, on every rank."""

    spec: PrepareSpec
    position: WindowPosition
    rows: Prefetcher | None = field(default=None, init=False)
    """What takes the rows of the current window; there during the loop."""

    def as_state(self) -> list[dict[str, Any]]:
        """Their part of a checkpoint's JSON state: the current window is the last."""
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
        self.rows.switch_to(rows, len(decided), first, plan.total_steps)


def may_follow(assembly: Assembly, progress: Progress) -> bool:
    """Whether a window may follow the current one: the run does not end with it by its duration."""
    limit = PortionPlans(assembly.resolved).limit
    return limit is None or progress.plan.total_steps < limit
