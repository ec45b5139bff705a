"""A look at the steps of a real run: recorded as `profile:` says, and examined where memory does not suffice."""

from __future__ import annotations

import gc
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tuner.config.recipe import ProfileSection
from tuner.errors import MemoryLimitError, is_out_of_memory
from tuner.model.blocks import apply_recompute
from tuner.model.build import decoder_blocks
from tuner.profile.devices import Device, data_sheet_rate
from tuner.profile.prediction import NAMES, PARTS, Part, largest_first, unit_of
from tuner.profile.recorder import Holding, MemoryRecord, StepRecorder, alike, resident
from tuner.runtime.console import Console
from tuner.runtime.files import TMP_PREFIX, gib
from tuner.setup.build import Assembly
from tuner.setup.less_memory import less_memory
from tuner.setup.mock import full_batches
from tuner.setup.resolve import recipe_again
from tuner.setup.settled import MICRO
from tuner.setup.specs import assembly_spec
from tuner.train.step import forward_backward, optimizer_step

if TYPE_CHECKING:
    from tuner.profile.predict import Target


class StepWatch:
    """Records steps of a real run into a directory, and explains one whose memory did not suffice.

    What fails in a recording is a warning, and the run continues.
    """

    def __init__(self, assembly: Assembly, section: ProfileSection, directory: Path, console: Console) -> None:
        self._assembly, self._section, self._rank = assembly, section, assembly.rank_info.rank
        self._modules = not assembly.resolved.compiles  # hooks on compiled layers would compile them again
        self._directory, self._console = directory, console

    def start(self, number: int) -> StepRecorder | None:
        """A recorder at work on step ``number``; None, with a warning, where it could not be started."""
        history = self._directory / f"memory-step-{number}-rank{self._rank}.pickle"
        snapshot = None if self._section.memory == "all" else history  # that one would end with the step
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            section = self._section
            recorder = StepRecorder(
                self._assembly.train_state, bool(section.memory), self._modules, snapshot,
                lines=section.lines, cuda_sync=section.cuda_sync,
            )  # fmt: skip
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
        The step is run once more to see what held the memory; a table on the console and a JSON file say so.
        """
        message = str(cause)
        clear_frames(error)
        self._console.say("memory", "not enough; looking at what holds it", "warning")
        if (report := self._report(number, message)) is None:
            return MemoryLimitError(f"out of memory: {message.splitlines()[0]}", hint=less_of(self._assembly))
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
        "peak_bytes": max(totals), "peak_parts": {part: size for part, size in record.parts(at).items() if size},
        "peak_by_phase": record.phase_peaks(), "largest": [asdict(holding) for holding in record.owners(at)[:50]],
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


BETWEEN = "between steps"
"""The phase of what could not be examined: neither forward nor backward."""
SHOWN, LISTED = 8, 400
"""Lines of the table, where like layers share one, and owners in the report."""


@dataclass(frozen=True)
class OomReport:
    """What was there when memory ran out, and overrides that were tried and fit, with their peak; empty if none did."""

    where: str
    phase: str
    module: str
    asked_bytes: int | None
    held_bytes: int
    parts: Mapping[Part, int]
    largest: tuple[Holding, ...]
    overrides: Mapping[str, str]
    override_peak_bytes: int | None
    less: str
    """What to write where none did."""
    is_tried: bool = True
    """Whether the overrides were tried, or only predicted."""
    predicted: Mapping[Part, int] = field(default_factory=dict)
    """What a prediction says of the fullest moment of a step; empty where there is none."""

    def line(self) -> str:
        """What happened, in one line."""
        at = f" of {self.module}" if self.module else ""
        asked = "" if self.asked_bytes is None else f"{gib(self.asked_bytes)} requested, "
        first = ", ".join(f"{NAMES[part]} of {owner} {gib(size)}" for owner, part, size in alike(self.largest)[:3])
        held = f"{gib(self.held_bytes)} of tensors held"
        return f"out of memory in {self.where}, {self.phase}{at}: {asked}{held}, most by {first}"

    def table(self) -> str:
        """What was held, by part and by the largest owners: one line each."""
        unit = unit_of(self.held_bytes)
        lines = [f"tensors {unit.of(self.held_bytes)}: {largest_first(self.parts)}"]
        if self.predicted:
            whole = unit.of(sum(self.predicted.values()))
            lines.append(f"predicted peak of a step {whole}: {largest_first(self.predicted)}")
        for owner, part, size in alike(self.largest)[:SHOWN]:
            lines.append(f"{unit.of(size):>12}  {NAMES[part]} of {owner}")
        return "\n".join(lines)

    def hint(self) -> str:
        """What to do."""
        if not self.overrides:
            return self.less
        peak = "" if self.override_peak_bytes is None else f", peak {gib(self.override_peak_bytes)} of tensors"
        how = "tried on full rows" if self.is_tried else "predicted, not tried"
        return f"{self.flags()} fits ({how}{peak}); the global batch stays the same"

    def flags(self) -> str:
        """The override as it is typed; empty where none was found."""
        return " ".join(f"--{key} {value}" for key, value in self.overrides.items())


def clear_frames(error: BaseException) -> None:
    """Let go of what a failed step still holds: the variables of its frames, and the errors that caused it."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        seen.add(id(here))
        traceback.clear_frames(here.__traceback__)
        here = here.__cause__ or here.__context__
    gc.collect()


def replay_step(assembly: Assembly, number: int, message: str) -> OomReport:
    """Take step ``number`` (0: the mock batch) again to see what holds the memory; ``message`` is the device's own.

    It runs as it did: a compiled layer is compiled, and known to hold what its modules do. For a single process: the
    others of several would have to take part. It raises what else goes wrong.
    """
    _clear(assembly)
    recorder, failed = _recorded(assembly, lambda: _take(assembly, number), modules=True)
    record = recorder.memory(failed)
    at = len(record.changes) - 1 if failed else record.peak_at()
    return with_fix(assembly, report_at(assembly, record, at, _where(number), _asked_bytes(message)))


def report_at(assembly: Assembly, record: MemoryRecord, at: int, where: str, asked: int | None = None) -> OomReport:
    """What a record has of the moment after change ``at``."""
    change, held, less = record.changes[at], record.totals()[at + 1], less_of(assembly)
    largest = tuple(record.owners(at)[:LISTED])
    return OomReport(where, change.phase, change.module, asked, held, record.parts(at), largest, {}, None, less)


def resident_report(assembly: Assembly, number: int, message: str) -> OomReport:
    """What can be said without the other processes: what lies there between steps."""
    owned = resident(assembly.train_state)
    parts: dict[Part, int] = {part: sum(block.size for block in owned if block.part == part) for part in PARTS}
    largest = sorted((Holding(block.owner, block.part, block.size) for block in owned), key=lambda h: -h.bytes)
    asked, held, less = _asked_bytes(message), sum(parts.values()), less_of(assembly)
    return OomReport(_where(number), BETWEEN, "", asked, held, parts, tuple(largest[:LISTED]), {}, None, less)


def with_fix(assembly: Assembly, report: OomReport, limit: int | None = None) -> OomReport:
    """Try the changes that keep the global batch, the cheapest first, until the largest micro-batch fits.

    It fits where the device can do it and, where there is one, within ``limit`` bytes of tensors.
    """
    resolved, size = assembly.resolved, assembly.batches.micro_batch_size
    for smaller in (n for n in range(size - 1, 0, -1) if size % n == 0):
        if (peak := _peak_of(assembly, smaller, limit)) is not None:
            return replace(report, overrides={MICRO: str(smaller)}, override_peak_bytes=peak)
    if resolved.compiles:  # compiling again to try it would take minutes
        return _with_prediction(assembly, report, limit)
    if assembly_spec(resolved).recompute != "none":
        return report
    apply_recompute(assembly.train_state.root, "full", len(decoder_blocks(assembly.train_state.root.model)))
    if (peak := _peak_of(assembly, 1, limit)) is None:
        return report
    overrides = {MICRO: "1"} if size > 1 else {}
    overrides["train.gradient_checkpointing"] = "full"
    return replace(report, overrides=overrides, override_peak_bytes=peak)


def _with_prediction(assembly: Assembly, report: OomReport, limit: int | None) -> OomReport:
    """The change that is predicted to fit, and to need clearly less than what failed; the report as it is without."""
    from tuner.profile.choose import choose_less
    from tuner.profile.predict import CONTEXT_BYTES

    recipe, target = recipe_again(assembly.resolved, {}), _target(assembly)
    target = target if limit is None else replace(target, limit_bytes=limit + CONTEXT_BYTES[target.device.kind])
    try:
        found = choose_less(recipe, target, assembly.prepared.path)
    except Exception:  # noqa: BLE001 - what cannot be predicted is left to the words of the hint
        return report
    if found is None:
        return report
    values, prediction = found
    overrides = {key: str(value).lower() if value is True else str(value) for key, value in values.items()}
    return replace(report, overrides=overrides, override_peak_bytes=prediction.tensor_bytes, is_tried=False)


def less_of(assembly: Assembly) -> str:
    """What to write in the recipe of a run that needs less memory."""
    return less_memory(assembly.resolved, assembly.rank_info.world_size)


def predicted_peak(assembly: Assembly) -> dict[Part, int]:
    """What is predicted for the fullest moment of a step of this run, as its allocator would count it."""
    from tuner.profile.predict import predict

    return predict(recipe_again(assembly.resolved, {}), _target(assembly)).memory.counted_peak()


def _target(assembly: Assembly) -> Target:
    """The device of this run, with what was free of it; its rate matters for nothing here but proportions."""
    from tuner.profile.predict import Target

    facts = assembly.resolved.facts
    rate = data_sheet_rate(facts.name) or 1e12
    here = Device(
        "here", facts.kind, facts.free_bytes, rate, facts.name, facts.generation, facts.has_fp8, facts.bf16_fast
    )
    return Target(here, assembly.rank_info, facts.free_bytes)


def _recorded(assembly: Assembly, work: Callable[[], object], modules: bool = False) -> tuple[StepRecorder, bool]:
    """Work under the recorder, and whether memory ran out in it."""
    with StepRecorder(assembly.train_state, modules=modules) as recorder:
        try:
            work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            clear_frames(error)
            return recorder, True
    return recorder, False


def _take(assembly: Assembly, number: int) -> None:
    state = assembly.train_state
    if number == 0:
        forward_backward(state, 0, full_batches(assembly, assembly.batches.micro_batch_size))
    else:
        batches = assembly.batches.step(0 if assembly.first_only else number - 1)
        optimizer_step(state, number - 1, batches, assembly.timetable.schedule.factor(number))


def _clear(assembly: Assembly) -> None:
    assembly.train_state.optimizer.zero_grad()
    gc.collect()
    if assembly.train_state.step_config.device.type == "cuda":
        torch.cuda.empty_cache()


def _peak_of(assembly: Assembly, size: int, limit: int | None) -> int | None:
    """The peak of a step on micro-batches of so many full rows, or None where that does not fit either."""
    _clear(assembly)
    state = assembly.train_state
    recorder, failed = _recorded(assembly, lambda: optimizer_step(state, 0, full_batches(assembly, size), 0.0))
    if failed:
        return None
    peak = max(recorder.memory().totals())
    return peak if limit is None or peak <= limit else None


def _where(number: int) -> str:
    return f"step {number}" if number else "the largest micro-batch"


def _asked_bytes(message: str) -> int | None:
    """The bytes that could not be had, as torch's allocators say it."""
    if found := re.search(r"allocate (\d+) bytes", message):
        return int(found[1])
    if found := re.search(r"allocate ([\d.]+) ([KMG])iB", message):
        return round(float(found[1]) * (1 << 10 * ("KMG".index(found[2]) + 1)))
    return None
