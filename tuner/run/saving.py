"""The saves of a launch: at once, or beside the steps that follow, one at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tuner.checkpoint.background import Background
from tuner.checkpoint.prune import prune
from tuner.checkpoint.save import CheckpointDir, require_room, save
from tuner.checkpoint.staging import Staged, Staging
from tuner.run.progress import run_tensors
from tuner.run.setup import Assembly
from tuner.rundir.records import Records
from tuner.runtime.collective import Collective
from tuner.runtime.process import another_gloo_group, gloo_group


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


class Saver:
    """Commits snapshots of an assembly, and prunes behind them.

    With ``beside`` a save copies the tensors and is written by a thread while training goes on. Its ranks agree over a
    group that no other thread uses. Making one is collective then.
    """

    def __init__(
        self, assembly: Assembly, checkpoints: CheckpointDir, meta: dict[str, Any], records: Sequence[Records]
    ) -> None:
        recipe = assembly.resolved.recipe
        self.checkpoints = checkpoints
        self._assembly, self._meta, self._records = assembly, meta, records
        self._keep = recipe.checkpoint.keep
        self._staging, self._thread = Staging(), Background[Snapshot | None]("save")
        self._beside = all(Collective(gloo_group()).on_all_ranks(lambda: recipe.checkpoint.async_save is True))
        if self._beside:
            self._thread_ranks = Collective(another_gloo_group(recipe.parallel.timeout.seconds))

    @property
    def ended(self) -> bool:
        """Whether a save beside training is over and was not asked about."""
        return self._thread.ended

    def prepare(self) -> None:
        """Check the disk and have the memory for copies made ready beside the first step. Collective.

        Raises MachineError where there is no room for one checkpoint.
        """
        tensors = run_tensors(self._assembly)
        Collective(gloo_group()).on_rank0(lambda: require_room(self.checkpoints.path, tensors))
        if self._beside:
            self._thread.start(lambda: self._reserve(tensors))

    def save(self, snapshot: Snapshot) -> Snapshot:
        """Commit a snapshot of the tensors as they are. Collective; raises what any rank raises."""
        return self._commit(snapshot, run_tensors(self._assembly), None, Collective(gloo_group()))

    def start(self, snapshot: Snapshot) -> bool:
        """Begin to commit a snapshot of the tensors as they are; False where it is to be saved at once.

        They may change from the next update on. The one before must have been waited for.
        """
        if not self._beside:
            return False
        tensors = run_tensors(self._assembly)
        staged = self._staging.stage(tensors)
        self._assembly.train_state.fence = staged.fence
        self._thread.start(lambda: self._commit(snapshot, tensors, staged, self._thread_ranks))
        return True

    def finish(self) -> Snapshot | None:
        """Wait for the save beside training; None where there was none. Raises what any rank raised in it."""
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
        parts = (tensors, snapshot.state, self._meta, snapshot.probe)
        save(self.checkpoints, snapshot.step, *parts, staged=staged, ranks=ranks)
        ranks.on_rank0(lambda: len(prune(self.checkpoints.path, self._keep, snapshot.protected)))
        return snapshot
