"""The task that exports checkpoints in the background of training, as the `export:` section of a recipe says.

Each in a process of its own, by the very command that a user would give, so that the bytes are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.config.numbers import byte_text
from tuner.config.recipe import ExportSection, Recipe
from tuner.errors import ExitCode, MachineError, RecipeError, TunerError, rebuilt
from tuner.export.hf import sweep_unfinished
from tuner.run.options import RunResult
from tuner.run.parts.part import LaunchContext
from tuner.run.state import is_unmergeable
from tuner.rundir.checkpoints import CheckpointHold, is_export, link_latest, newest_export, prune_exports
from tuner.rundir.layout import EXPORT_LOG, EXPORTS, LOGS
from tuner.runtime.console import Console
from tuner.runtime.files import gib, machine_errors
from tuner.train.plan import Cadence
from tuner.train.tasks import Event, Request, TakenStep, Task

NICENESS = 10
"""Of an export beside training, above this process's own: training goes first."""


@dataclass
class Exporter:
    """Exports of one run, one at a time and at most one waiting, none of which training waits for.

    As a context manager it ends on leaving what still runs: a stopped run makes that export when it is resumed.
    """

    recipe: Recipe
    console: Console
    _prune: Callable[[], int] = field(default=lambda: 0)
    _every: Cadence = Cadence()
    _asked_at: float = field(default_factory=time.monotonic)
    _made: SimpleQueue[Path] = field(default_factory=SimpleQueue)
    """Exports that are done and were not reported yet."""
    tell: Callable[[Path], None] = lambda path: None
    """Called with each export by :meth:`tell_made`."""
    _jobs: list[tuple[ExportProcess, Future[None]]] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="export"))

    @property
    def exports(self) -> Path:
        """Where they go."""
        return Path(self.recipe.output_dir) / EXPORTS

    @property
    def log(self) -> Path:
        """Where their messages go."""
        return Path(self.recipe.output_dir) / LOGS / EXPORT_LOG

    @property
    def options(self) -> dict[str, Any]:
        """What tells this run's exports from others, as their `tuner.json` has it."""
        section = self.recipe.export
        adapter = "none" if self.recipe.adapter.kind == "none" else section.adapter
        named: dict[str, Any] = {"dtype": section.dtype, "adapter": adapter, "shard_size": section.shard_size}
        named |= {"keep_fp32": list(section.keep_fp32)} if section.keep_fp32 else {}
        return named if self._base is None else {**named, "base": self._base}

    @property
    def _base(self) -> str | None:
        """What the adapter of a quantised base is merged into; None where there is no choice."""
        is_merged = self.recipe.model.quantize != "none" and self.recipe.export.adapter == "merge"
        return self.recipe.export.base if is_merged else None

    def start(self, every: Cadence, console: Console, checkpoints: Path, prune: Callable[[], int] = lambda: 0) -> None:
        """Exports are due at `every`; begin with that of the newest checkpoint, where an earlier launch still owed it.

        ``prune`` removes older checkpoints: those that were being exported when their turn came wait for the end.
        """
        self.console, self._every, self._prune, self._asked_at = console, every, prune, time.monotonic()
        due = [(step, path) for step, path in step_dirs(checkpoints) if step > 0 and self._every.due_at(step)]
        if due and due[0][0] > newest_export(self.exports, self.options):
            self._add(due[0][1])

    def saved(self, checkpoint: Path, step: int, is_asked: bool = False) -> None:
        """A checkpoint was saved after `step`: export it where that is due, or asked for."""
        if is_asked or self._every.due_at(step) or self._every.due_after(time.monotonic() - self._asked_at):
            self._asked_at = time.monotonic()
            self._add(checkpoint)

    def finish(self, result: RunResult, at_end: bool = True) -> None:
        """Wait for a finished run's exports; with `at_end` export its last checkpoint, too, where the recipe says so.

        Raises the first export's error: by now the run itself is complete. A run that was stopped raises nothing.
        """
        if result.status != "finished":
            return
        if at_end and self.recipe.export.at_end and result.checkpoint is not None:
            is_asked = any(process.held.path == result.checkpoint for process, _ in self._jobs)
            if not is_asked and not is_export(self.exports / step_name(result.step), result.step, self.options):
                self._add(result.checkpoint, niceness=0)  # training waits for it
        self._wait()
        self.tell_made()
        self._prune()
        for _, future in self._jobs:
            future.result()

    def tell_made(self) -> None:
        """Tell of the exports that are done, each once."""
        while not self._made.empty():
            self.tell(self._made.get())

    def _wait(self) -> None:
        """Until no export runs; say so where that takes a while."""
        if left := [(process, future) for process, future in self._jobs if not future.done()]:
            names = ", ".join(process.output.name for process, _ in left)
            self.console.say("export", f"training is over, {names} is being exported: {self.log}")
        for _, future in left:
            future.exception()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *error: object) -> None:
        for process, future in self._jobs:
            future.cancel()
            process.end()
        self._pool.shutdown()

    def _add(self, checkpoint: Path, niceness: int = NICENESS) -> None:
        """Queue one; one that still waits gives way, so that slow exports neither pile up nor keep checkpoints."""
        for process, future in self._jobs:
            if future.cancel():
                process.held.close()
                name = process.output.name
                self.console.warn(f"the export of {name} is skipped: the one before it is not done yet")
        self._jobs = [job for job in self._jobs if not job[1].cancelled()]
        hold = CheckpointHold(checkpoint)
        output = self.exports / checkpoint.name
        process = ExportProcess(hold, output, self.recipe.export, self._base, self.log, self.console.warn, niceness)
        future = self._pool.submit(self._export, process)
        future.add_done_callback(self._say_failure)
        self._jobs.append((process, future))

    def _export(self, process: ExportProcess) -> None:
        with machine_errors(self.exports):
            self.exports.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(self.exports, "step-")
        figures = process.run()
        link_latest(self.exports, process.output.name)
        prune_exports(self.exports, self.recipe.export.keep, self.options)
        self._made.put(process.output)
        self.console.say("exported", f"{process.output} ({gib(figures['bytes'])} in {figures['seconds']:.1f} s)")

    def _say_failure(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, TunerError) and error.exit_code == ExitCode.INTERRUPTED:
            self.console.warn(f"{error.message}; it is made when the run is resumed")
        elif isinstance(error, TunerError):
            self.console.warn(f"{error.message}; training continues")
        elif error is not None:
            self.console.warn(f"an export failed: {type(error).__name__}: {error}; training continues")


class ExportTask(Task):
    """Hands saved checkpoints to the exporter of the run. Rank 0 alone has one; on the others it does nothing."""

    def __init__(
        self, exporter: Exporter, context: LaunchContext, prune: Callable[[], int], tell: Callable[[Path], None]
    ) -> None:
        if exporter.recipe.export.adapter == "merge" and is_unmergeable(context.assembly):
            raise RecipeError(
                "export.adapter: merge: an adapted layer shares its weight with another, and merging would change both",
                hint="write export.adapter: keep",
            )
        self._exporter, self._context, self._console, self._prune = exporter, context, context.console, prune
        self._is_on, self._is_asked = context.assembly.rank_info.is_main, False
        exporter.tell = tell

    def start(self) -> None:
        """Make up for an export that an earlier launch owed."""
        if self._is_on:
            with self._warned():
                every, checkpoints = self._context.assembly.timetable.exporting, self._context.run.checkpoints
                self._exporter.start(every, self._console, checkpoints, self._prune)

    def step_taken(self, taken: TakenStep) -> None:
        """Tell of the exports that are done."""
        self._exporter.tell_made()

    def between_steps(self, agreed: Request) -> None:
        """Note that the checkpoint of this step is asked for."""
        self._is_asked = self._is_asked or Request.EXPORT in agreed

    def notify(self, event: Event) -> None:
        """Export a checkpoint where that is due, or asked for."""
        if self._is_on and event.stage == "save" and event.path is not None:
            with self._warned():
                self._exporter.saved(event.path, event.step, self._is_asked)
            self._is_asked = False

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """An export is never the run's loss: what keeps it from being made is a warning."""
        try:
            yield
        except TunerError as error:
            self._console.warn(f"{error.message}; training continues")


@dataclass
class ExportProcess:
    """`tuner export-hf CHECKPOINT` with a run's settings; the checkpoint is not pruned while it is held."""

    held: CheckpointHold
    output: Path
    section: ExportSection
    base: str | None
    """What the adapter of a quantised base is merged into; None where there is no choice."""
    log: Path
    warn: Callable[[str], None]
    """Called with each warning of the command."""
    niceness: int
    """Above this process's own."""
    _process: subprocess.Popen[bytes] | None = None
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> dict[str, Any]:
        """Export; returns the figures that the command reports. Raises the command's error, MachineError where killed.

        It blocks: call it in a thread of its own.
        """
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.held, self.log.open("ab") as log:
                if self._ending.is_set():
                    raise self._cut_short()
                self._process = subprocess.Popen(
                    self._command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, own + self.niceness)  # its threads inherit it
                if self._ending.is_set():
                    self._process.terminate()
                out, _ = self._process.communicate()
        except OSError as error:
            raise MachineError(f"{self.output}: the export could not be started: {error.strerror or error}") from error
        return self._figures(out, self._process.returncode)

    def end(self) -> None:
        """End it: what it has written so far goes, what it has published stays."""
        self._ending.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _command(self) -> list[str]:
        section = self.section
        words = [sys.executable, "-m", "tuner", "export-hf", str(self.held.path), "--output", str(self.output)]
        words += ["--dtype", section.dtype, "--adapter", section.adapter]
        words += ["--keep-fp32", ",".join(section.keep_fp32)] if section.keep_fp32 else []
        words += [] if self.base is None else ["--base", self.base]
        return [*words, "--shard-size", byte_text(section.shard_size), "--json"]

    def _figures(self, out: bytes, code: int) -> dict[str, Any]:
        if self._ending.is_set() or code == ExitCode.INTERRUPTED:
            raise self._cut_short()
        try:
            document = json.loads(out)
            for text in document.get("warnings", ()):
                self.warn(f"export of {self.output.name}: {text}")
            if code == 0:
                figures: dict[str, Any] = document["metrics"]
                return figures
            error = document["error"]
        except (ValueError, KeyError, TypeError):
            raise MachineError(
                f"{self.output}: the export ended with code {code} and said nothing",
                hint=f"its log: {self.log}; export it with: tuner export-hf {self.held.path}",
            ) from None
        raise rebuilt(error["type"], f"export of {self.output.name}: {error['message']}", error["hint"], code)

    def _cut_short(self) -> TunerError:
        error = MachineError(
            f"the export of {self.output.name} was cut short", hint=f"export it with: tuner export-hf {self.held.path}"
        )
        error.exit_code = ExitCode.INTERRUPTED
        return error
