"""The tasks that save checkpoints: at once, or in the background of the steps that follow, one at a time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.checkpoint.save import CheckpointDir, WriteShards, require_room, save
from tuner.checkpoint.staging import Staged, Staging
from tuner.config.recipe import CheckpointSection
from tuner.errors import MachineError
from tuner.run.background import Background
from tuner.run.parts.part import LaunchContext
from tuner.run.state import run_state
from tuner.run.tasks.console import TimeLeft
from tuner.run.tasks.log import LogTask
from tuner.rundir.checkpoints import prune
from tuner.rundir.records import Records
from tuner.runtime import phase
from tuner.runtime.process import Collective, another_gloo_group, gloo_group
from tuner.setup.build import Assembly, run_tensors
from tuner.setup.probes import record_probes
from tuner.train.tasks import Event, Request, Task


@dataclass(frozen=True)
class Snapshot:
    """A run after a step, but for its tensors: what its checkpoint says of it, however late that is written."""

    step: int
    tokens: int
    state: Mapping[str, Any]
    probe: Mapping[str, torch.Tensor] | None
    protected: tuple[Path, ...]
    """Checkpoints that the pruning after it leaves alone."""


class Saver(Task):
    """Commits snapshots of an assembly, and prunes older ones.

    In the background a save copies the tensors and is written by a thread while training continues. Its ranks agree
    over a group that no other thread uses. Making one is collective then. Where nobody asked for that and a rank lacks
    the memory for copies, they are saved at once, with a warning. ``meta`` gives rank 0 what the manifest of a step
    says of the run, when it is written; ``verify`` is called before a state is saved.
    """

    def __init__(
        self, assembly: Assembly, section: CheckpointSection, checkpoints: CheckpointDir,
        meta: Callable[[int], Mapping[str, Any]], records: Sequence[Records], timeout_s: float,
        verify: Callable[[], None] = lambda: None,
    ) -> None:
        self.section, self.checkpoints, self.verify = section, checkpoints, verify
        self._assembly, self._meta, self._records = assembly, meta, records
        self._protected: tuple[Path, ...] = ()
        """Of the last snapshot."""
        device = assembly.train_state.step_config.device
        self._on_cuda = device.type == "cuda"
        self._staging = Staging()
        self._thread = Background[Snapshot | None]("save", device if self._on_cuda else None)
        self._in_background = all(Collective(gloo_group()).on_all_ranks(lambda: section.async_save is True))
        self._is_auto = "checkpoint.async_save" in assembly.resolved.reasons
        self._no_room: str | None = None
        """Why there is no memory for copies, on any rank; found by the thread, heeded when it was waited for."""
        self._to_say: list[str] = []
        if self._in_background:
            self._thread_ranks = Collective(another_gloo_group(timeout_s))

    @property
    def ended(self) -> bool:
        """Whether a save in the background is over and was not asked about."""
        return self._thread.ended

    def write_by(self, write: WriteShards) -> None:
        """Have the ranks' files of each save written in another way."""
        self.checkpoints = replace(self.checkpoints, write=write)

    def start(self) -> None:
        """Check the disk and have the memory for copies made ready during the first step. Collective.

        Raises MachineError where there is no room for one checkpoint.
        """
        tensors = run_tensors(self._assembly.train_state)
        Collective(gloo_group()).on_rank0(lambda: require_room(self.checkpoints.path, tensors))
        if self._in_background:
            held = self._assembly.train_state.optimizer.host_names()
            copied = {name: tensor for name, tensor in tensors.items() if name not in held}
            self._thread.start(lambda: self._reserve(copied))

    def save(self, snapshot: Snapshot) -> Snapshot:
        """Commit a snapshot of the tensors as they are. Collective; raises what any rank raises.

        From a device through the memory for copies, where there is some: page-locked, it takes them several times as
        fast as memory that is fresh for each tensor. What the recipe has in the host's memory is written from there.
        """
        state = self._assembly.train_state
        tensors, held = run_tensors(state), state.optimizer.host_names()
        staged = self._staging.stage(tensors, held) if self._on_cuda and self._in_background else None
        return self._commit(snapshot, tensors, staged, Collective(gloo_group()))

    def begin(self, snapshot: Snapshot) -> bool:
        """Begin to commit a snapshot of the tensors as they are; False where it is to be saved at once.

        They may change from the next update on, which waits for those that are in the host's memory until they are
        written: they are not copied. The one before must have been waited for.
        """
        if not self._in_background:
            return False
        state = self._assembly.train_state
        tensors, held = run_tensors(state), state.optimizer.host_names()
        staged = self._staging.stage(tensors, held)
        state.fence.set(staged.copied, staged.written if held else None)
        self._thread.start(lambda: self._commit(snapshot, tensors, staged, self._thread_ranks))
        return True

    def wait(self) -> Snapshot | None:
        """Wait for the save in the background; None where there was none. Raises what any rank raised in it."""
        snapshot = self._thread.finish()
        if self._no_room is not None:
            self._to_say.append(f"{self._no_room}: training waits for each save")
            self._in_background, self._no_room = False, None
            self._staging.release()
        return snapshot

    def warned(self) -> list[str]:
        """What people should know of the memory for copies, once."""
        said, self._to_say = self._to_say, []
        return said

    def _reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the memory for copies on every rank, or on none. Raises MachineError where it was asked for."""

        def reserve() -> str | None:
            try:
                self._staging.reserve(tensors)
            except MachineError as error:
                if not self._is_auto:
                    raise
                return error.message
            return None

        self._no_room = next(filter(None, self._thread_ranks.on_all_ranks(reserve)), None)
        if self._staging.problem is not None:
            self._to_say.append(self._staging.problem)

    def _commit(
        self, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], staged: Staged | None, ranks: Collective
    ) -> Snapshot:
        try:
            ranks.on_rank0(lambda: list(map(Records.sync, self._records)))
            meta = ranks.on_rank0(lambda: self._meta(snapshot.step))
            step, state, probe = snapshot.step, snapshot.state, snapshot.probe
            save(self.checkpoints, step, tensors, state, meta, probe, staged=staged, ranks=ranks)
        finally:
            if staged is not None:
                staged.written.set()
        self._protected = snapshot.protected
        ranks.on_rank0(self.prune)
        return snapshot

    def prune(self) -> int:
        """Remove older checkpoints, as the last save did; how many. On one rank, while nothing is saved."""
        return len(prune(self.checkpoints.path, self.section.keep, self._protected))


class SaveTask(Task):
    """Saves where it is due, in the background of the steps that follow, and at the end of the launch at once.

    Records reach the disk before the checkpoint, so that they never lack a committed step. ``resumed_from`` is a
    checkpoint of this run that pruning leaves alone.
    """

    def __init__(
        self, context: LaunchContext, saver: Saver, log: LogTask, samples: Records, time_left: TimeLeft,
        resumed_from: Path | None,
    ) -> None:
        self._context, self._assembly, self._progress = context, context.assembly, context.progress
        self._console = context.console
        self._saver, self._log, self._samples, self._time_left = saver, log, samples, time_left
        self._protected = () if resumed_from is None else (resumed_from,)
        self._saved_at, self._changes_data = time.monotonic(), any(part.changes_data for part in context.parts)

    def start(self) -> Iterator[Event]:
        """Check that the best checkpoint so far is still there, and save before the first step of a run that asks it.

        Collective.
        """
        best = self._progress.best
        if best is not None and not Collective(gloo_group()).on_rank0(lambda: self._path_of(best.step).is_dir()):
            self._console.warn(f"{self._path_of(best.step)}, the best so far, is gone: the next evaluation is the best")
            self._progress.best = None
        self._saved_at = time.monotonic()
        if self._saver.section.at_start and self._progress.step == 0 and self._progress.saved_step is None:
            yield from self._save(finished=False, last=False)

    def request(self) -> Request:
        """A save, where the clock says so; and to take note of one that has ended in the background."""
        table = self._assembly.timetable
        is_due = table.saving.due_after(time.monotonic() - self._saved_at)
        is_due = is_due and not table.is_near_kept(self._progress.step)
        asked = Request.SAVE if is_due else Request.NONE
        return asked | Request.JOIN_SAVE if self._saver.ended else asked

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Save where any rank's clock or the step says so; the last step's save is `finish`'s."""
        if Request.JOIN_SAVE in agreed:
            yield from self._join()
        progress = self._progress
        if Request.STOP in agreed or progress.is_over:
            return
        is_due = self._assembly.timetable.saves_at(progress.step)
        is_asked = Request.SAVE in agreed or Request.EXPORT in agreed
        if is_asked or is_due or self._is_kept() or (progress.is_last_step and progress.saves_last):  # of a portion
            yield from self._save(finished=False, last=False)

    def finish(self, finished: bool) -> Iterator[Event]:
        """Save what no checkpoint holds yet, unless a finished run is to have none at its end."""
        yield from self._join()
        is_saved = self._progress.saved_step == self._progress.step
        if is_saved and self._changes_data:  # the last portion's end was not known to be the run's
            return
        if (self._saver.section.at_end or self._is_kept()) if finished else not is_saved:
            yield from self._save(finished, last=True)

    def close(self) -> Iterator[Event]:
        """Leave no save half done after an error; warn of one that fails, too."""
        try:
            yield from self._join()
        except Exception as error:  # noqa: BLE001 - another error is being raised
            self._console.warn(f"a save failed, too: {error}")

    def _is_kept(self) -> bool:
        """Whether the step just taken is one of which pruning leaves the checkpoint alone."""
        step, best = self._progress.step, self._progress.best
        return self._assembly.timetable.is_kept(step) or (best is not None and best.step == step)

    def _save(self, finished: bool, last: bool) -> Iterator[Event]:
        """Save the run as it is: at once if the launch ends here, ``last``, else in the background. Collective."""
        phase.enter(f"save of step {self._progress.step}")
        yield from self._log.flush()  # the wait for steps that still run is theirs
        with self._log.clock.pause() as pause:
            yield from self._join()
            self._saver.verify()
            self._log.metrics.flush()
            self._samples.flush()
            with self._console.doing(f"saving step {self._progress.step}"):
                snapshot = self._snapshot(finished)
                committed = None if not last and self._saver.begin(snapshot) else self._saver.save(snapshot)
        if committed is not None:
            yield self._saved(committed)
        self._saved_at = time.monotonic()
        self._time_left.took["save"] = pause.seconds

    def _join(self) -> Iterator[Event]:
        """Wait for a save in the background, if there is one, and tell of it. Raises what any rank raised in it."""
        snapshot = self._saver.wait()
        for text in self._saver.warned():
            self._console.warn(text)
        if snapshot is not None:
            yield self._saved(snapshot)

    def _snapshot(self, finished: bool) -> Snapshot:
        assembly, progress = self._assembly, self._progress
        state, table = assembly.train_state, assembly.timetable
        kept = {step for step, _ in step_dirs(self._saver.checkpoints.path) if table.is_kept(step)}
        if progress.best is not None:
            kept.add(progress.best.step)
        is_end = progress.is_at_end or progress.is_last_step  # of the run, or of a portion
        is_probed = is_end or self._is_kept() or table.exporting.due_at(progress.step)
        return Snapshot(
            progress.step, progress.tokens, run_state(self._context, finished) | {"guard": state.guard.as_state()},
            record_probes(state.root, assembly.probes, state.step_config.device) if is_probed else None,
            (*self._protected, *map(self._path_of, kept)),
        )

    def _saved(self, snapshot: Snapshot) -> Event:
        path = self._path_of(snapshot.step)
        self._progress.saved_step = snapshot.step
        return Event("save", snapshot.step, snapshot.tokens, path=path)

    def _path_of(self, step: int) -> Path:
        return self._saver.checkpoints.path / step_name(step)
