"""The loss of each process by itself, where each writes its metrics (`logging.metrics_of: all`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tuner.data.batches import Batch, step_of
from tuner.run.parts.part import LaunchContext, Part, TaskNeeds
from tuner.train.methods.method import Counts, Method, Terms
from tuner.train.progress import Progress, finite
from tuner.train.step_parts import StepForwards, StepPart
from tuner.train.tasks import Task


class LocalLosses(Part):
    """A part of each step that gives the log a column."""

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """None: it is of the steps, before all else that these have."""
        state = context.assembly.train_state
        column = LocalLoss(state.method, state.step_config.mesh.sequence, context.progress)
        state.parts = (column, *state.parts)
        needs.log.columns.append(column)
        return ()


class LocalLoss(StepPart):
    """The column ``local_loss`` of a step's line: this process's sums of the method's losses over its own counts.

    ``sharers`` processes hold the same rows, and a share of their sums each. It is the first of a step's parts, so that
    no other part's losses are in the terms that it sees.
    """

    def __init__(self, method: Method, sharers: int, progress: Progress) -> None:
        self._method, self._sharers, self._progress = method, sharers, progress
        self._counts: Counts = {}
        self._sums = Terms({}, {})
        self._unread: dict[int, torch.Tensor] = {}
        """Scalars of the host by step, on their way from the device."""

    def before_forward(self, step: StepForwards) -> None:
        """Count what is trained here."""
        self._counts, self._sums = self._method.counts(step_of(step.batches.micro)), Terms({}, {})

    def terms(self, batch: Batch, terms: Terms) -> Terms:
        """Add a micro-batch's sums up; they stay as they are."""
        self._sums = Terms(terms.losses, {}).plus(self._sums)
        return terms

    def after_update(self, skip: torch.Tensor) -> None:
        """Have the mean copied, unless there was nothing to take one of."""
        if means := [one.mean(self._counts) for one in self._sums.losses.values() if self._counts[one.per]]:
            loss = self._sharers * torch.stack(means).sum()
            copy = torch.empty((), dtype=loss.dtype, pin_memory=loss.is_cuda)
            self._unread[self._progress.step + 1] = copy.copy_(loss, non_blocking=True)

    def of(self, line: Mapping[str, Any]) -> dict[str, float | None]:
        """The column of a step that was taken here; its line is read after the device's last work of the step."""
        loss = self._unread.pop(line["step"], None)
        return {} if loss is None else {"local_loss": finite(loss.item())}
