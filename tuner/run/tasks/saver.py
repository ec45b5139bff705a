"""The saves of a launch: at once, or in the background of the steps that follow, one at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tuner.checkpoint.background import Background
from tuner.checkpoint.prune import prune
from tuner.checkpoint.save import CheckpointDir, require_room, save
from tuner.checkpoint.staging import Staged, Staging
from tuner.run.build import Assembly
from tuner.run.state import run_tensors
from tuner.rundir.records import Records
from tuner.runtime.collective import Collective
from tuner.runtime.process import another_gloo_group, gloo_group
from tuner.train.tasks import Event, Task


@dataclass(frozen=True)
class Snapshot:
    """A run after a step, but for its tensors: what its checkpoint says of it, however late that is written."""

    step: int
    tokens: int
    state: Mapping[str, Any]
    probe: Mapping[str, torch.Tensor] | None
    protected: tuple[Path, ...]
    """Checkpoints that the pruning after it leaves alone."""
    is_best: bool


class Saver(Task):
    """Commits snapshots of an assembly, and prunes behind them.

    In the background a save copies the tensors and is written by a thread while training continues. Its ranks agree
    over a group that no other thread uses. Making one is collective then.
    """

    def __init__(
        self, assembly: Assembly, checkpoints: CheckpointDir, meta: dict[str, Any], records: Sequence[Records]
    ) -> None:
        recipe = assembly.resolved.recipe
        self.checkpoints = checkpoints
        self._assembly, self._meta, self._records = assembly, meta, records
        self._keep = recipe.checkpoint.keep
        self._staging, self._thread = Staging(), Background[Snapshot | None]("save")
        self._in_background = all(Collective(gloo_group()).on_all_ranks(lambda: recipe.checkpoint.async_save is True))
        if self._in_background:
            self._thread_ranks = Collective(another_gloo_group(recipe.parallel.timeout.seconds))

    @property
    def ended(self) -> bool:
        """Whether a save in the background is over and was not asked about."""
        return self._thread.ended

    def start(self) -> Iterable[Event]:
        """Check the disk and have the memory for copies made ready during the first step. Collective.

        Raises MachineError where there is no room for one checkpoint.
        """
        tensors = run_tensors(self._assembly)
        Collective(gloo_group()).on_rank0(lambda: require_room(self.checkpoints.path, tensors))
        if self._in_background:
            self._thread.start(lambda: self._reserve(tensors))
        return ()

    def save(self, snapshot: Snapshot) -> Snapshot:
        """Commit a snapshot of the tensors as they are. Collective; raises what any rank raises."""
        return self._commit(snapshot, run_tensors(self._assembly), None, Collective(gloo_group()))

    def begin(self, snapshot: Snapshot) -> bool:
        """Begin to commit a snapshot of the tensors as they are; False where it is to be saved at once.

        They may change from the next update on. The one before must have been waited for.
        """
        if not self._in_background:
            return False
        tensors = run_tensors(self._assembly)
        staged = self._staging.stage(tensors)
        self._assembly.train_state.copied = staged.copied
        self._thread.start(lambda: self._commit(snapshot, tensors, staged, self._thread_ranks))
        return True

    def wait(self) -> Snapshot | None:
        """Wait for the save in the background; None where there was none. Raises what any rank raised in it."""
        return self._thread.finish()

    def _reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._thread_ranks.on_all_ranks(lambda: self._staging.reserve(tensors))

    def _sync_records(self) -> None:
        for records in self._records:
            records.sync()

    def _commit(
        self, snapshot: Snapshot, tensors: Mapping[str, torch.Tensor], staged: Staged | None, ranks: Collective
    ) -> Snapshot:
        ranks.on_rank0(self._sync_records)
        save(
            self.checkpoints,
            snapshot.step,
            tensors,
            snapshot.state,
            self._meta,
            snapshot.probe,
            staged=staged,
            ranks=ranks,
        )
        ranks.on_rank0(lambda: len(prune(self.checkpoints.path, self._keep, snapshot.protected)))
        return snapshot
