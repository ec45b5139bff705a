"""A look at the steps of a real run: recorded as `profile:` says, and examined where memory does not suffice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tuner.errors import MemoryLimitError
from tuner.profile.blocks import MemoryRecord
from tuner.profile.oom import OomReport, clear_frames, predicted_peak, replay_step, resident_report
from tuner.profile.recorder import StepRecorder
from tuner.runtime.console import Console
from tuner.runtime.files import TMP_PREFIX, gib
from tuner.setup.build import Assembly
from tuner.setup.less_memory import less_memory


class StepWatch:
    """Records steps of a real run into a directory, and explains one whose memory did not suffice.

    What fails in a recording is a warning, and the run goes on.
    """

    def __init__(self, assembly: Assembly, directory: Path, console: Console) -> None:
        recipe = assembly.resolved.recipe
        self._assembly, self._section, self._rank = assembly, recipe.profile, assembly.rank_info.rank
        self._modules = recipe.train.compile is not True  # hooks on compiled layers would compile them again
        self._directory, self._console = directory, console

    def start(self, number: int) -> StepRecorder | None:
        """A recorder at work on step ``number``; None, with a warning, where it could not be started."""
        snapshot = self._directory / f"memory-step-{number}-rank{self._rank}.pickle"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            recorder = StepRecorder(self._assembly.train_state, self._section.memory, self._modules, snapshot)
            try:
                recorder.start()
            except BaseException:
                with suppress(Exception):  # nothing may have begun yet
                    recorder.stop()
                raise
        except Exception as error:
            self._warn(f"started for step {number}", error)
            return None
        return recorder

    def stop(self, recorder: StepRecorder) -> bool:
        """End a recording, also that of a step that failed; False, with a warning, where it is of no use."""
        try:
            recorder.stop()
        except Exception as error:
            self._warn("stopped", error)
            return False
        return True

    def write(self, number: int, recorder: StepRecorder) -> None:
        """Write what a stopped recorder saw of step ``number``: its trace and its memory, as the recipe says."""
        name, written = f"step-{number}-rank{self._rank}", []
        try:
            if self._section.time:
                with _whole(self._directory / f"trace-{name}.json.gz") as path:
                    recorder.write_trace(path)
                written.append(f"trace-{name}.json.gz")
            if self._section.memory:
                record = recorder.memory()
                with _whole(self._directory / f"memory-{name}.json") as path:
                    path.write_text(json.dumps({"step": number, "rank": self._rank, **memory_figures(record)}))
                written.append(f"peak {gib(max(record.totals()))}")
            self._console.say("profile", f"step {number}: {self._directory}, {', '.join(written)}")
        except Exception as error:
            self._warn("written", error)

    def explain(self, number: int, error: BaseException, cause: BaseException) -> MemoryLimitError:
        """The error with which a run ends whose memory did not suffice in step ``number`` (0: before the first).

        ``cause`` is the allocator's own error within ``error``, whose frames are cleared: what they held is free again.
        The step is taken once more to see what held the memory; a table on the console and a JSON file say so.
        """
        message = str(cause)
        clear_frames(error)
        self._console.say("memory", "not enough; looking at what holds it", "warning")
        report = self._report(number, message)
        if report is None:
            hint = less_memory(self._assembly.resolved.recipe, self._assembly.rank_info.world_size)
            return MemoryLimitError(f"out of memory: {message.splitlines()[0]}", hint=hint)
        self._console.say("held", report.table(), "warning")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with _whole(self._directory / f"out-of-memory-rank{self._rank}.json") as path:
                path.write_text(json.dumps(asdict(report), indent=1))
        except Exception as failure:
            self._warn("written", failure)
        return MemoryLimitError(report.line(), hint=report.hint())

    def _report(self, number: int, message: str) -> OomReport | None:
        """The step taken again where this process is alone, else what lies there between steps."""
        for make in (replay_step, resident_report) if self._assembly.rank_info.world_size == 1 else (resident_report,):
            try:
                report = make(self._assembly, number, message)
            except Exception as error:
                self._console.warn(f"the memory could not be examined: {type(error).__name__}: {error}")
                continue
            try:
                return replace(report, predicted=predicted_peak(self._assembly))
            except Exception as error:
                self._console.warn(f"no prediction: {type(error).__name__}: {error}")
                return report
        return None

    def _warn(self, what: str, error: Exception) -> None:
        self._console.warn(f"the recording could not be {what}: {type(error).__name__}: {error}; training continues")


def memory_figures(record: MemoryRecord) -> dict[str, Any]:
    """A record as JSON: its peak, what it was made of, the largest owners, and its parts over time."""
    at, totals = record.peak_at(), record.totals()
    seconds, series = record.timeline()
    return {
        "peak_bytes": max(totals),
        "peak_parts": {part: size for part, size in record.parts(at).items() if size},
        "peak_by_phase": record.phase_peaks(),
        "largest": [asdict(holding) for holding in record.owners(at)[:50]],
        "timeline": {"seconds": seconds, "bytes": series},
    }


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary path in its directory, with the same ending, that takes its name once it is written whole."""
    fresh = path.with_name(f"{TMP_PREFIX}{os.getpid()}-{path.name}")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
