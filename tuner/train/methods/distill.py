"""Distillation: the student learns a teacher's distribution of every trained token, and with ``ce_weight`` the data.

The loss is :mod:`tuner.model.divergence`'s, its mean over the trained tokens of the global batch. The teacher is in
memory, and runs on the same packed rows just before the student, or its most probable tokens are columns of the rows.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from tuner.config.methods import DistillMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.divergence import Distillation, Tail, TeacherLogits, TopTeacher, WholeTeacher, distil
from tuner.model.output_layer import Objective, OutputLayer, Result
from tuner.model.root import CausalLM
from tuner.train.methods.method import Counts, DeviceColumns, Method, Microbatch, Sum, Terms

KEPT = ("ids", "log_p", "rest", "next")
"""The columns of a teacher's most probable tokens, by the names of :class:`TopTeacher`'s fields."""


class Distill(Method):
    """The mean over trained tokens of their divergence from the teacher's distribution."""

    by_terms = True

    def __init__(self, section: DistillMethod) -> None:
        self._how = Distillation(section.beta, section.temperature, section.ce_weight)
        self._tail: Tail = section.tail
        self._top_k = section.top_k
        self.vocabulary: int | None = None
        """Of how many tokens the columns' distributions are; whoever gives the rows their columns says it."""

    def forward(self, root: CausalLM, microbatch: Microbatch, objective: Objective[Result]) -> Result:
        """The student's forward where the teacher's output layer is whole: inside the teacher's own.

        Under FSDP2 each of both is gathered once, and no chunk of positions gathers anything.
        """
        if self.teacher is None:
            return super().forward(root, microbatch, objective)
        found, with_gradient = list[Result](), torch.is_grad_enabled()

        def student(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> None:
            taught = partial(cast(Any, objective), teacher=WholeTeacher(hidden, head))
            with torch.set_grad_enabled(with_gradient):
                found.append(root(*microbatch, taught))

        with torch.no_grad():
            self.teacher(*microbatch, student)  # returns nothing: FSDP2 would gather it again to go backward
        return found[0]

    def counts(self, batches: StepBatches) -> Counts:
        """Trained tokens."""
        return {"tokens": batches.trained_count}

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """The teacher's tokens at the trained positions, where they are columns."""
        return {} if self._top_k is None else {name: batch.of_trained[name] for name in KEPT}

    def made_up(self, batch: Batch) -> Batch:
        """With a teacher's tokens, where they are columns and not there."""
        if self._top_k is None or batch.of_trained:
            return batch
        count = len(batch.trained_positions)
        ids: npt.NDArray[np.uint32] = np.zeros((count, self._top_k), np.uint32)
        log_p: npt.NDArray[np.float32] = np.full(ids.shape, -2 * np.log(1 + self._top_k), np.float32)
        made: npt.NDArray[np.float32] = np.full(count, -1, np.float32)
        return replace(batch, of_trained={"ids": ids, "log_p": log_p, "rest": made, "next": made})

    def terms(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns,
        teacher: TeacherLogits | None = None,
    ) -> Terms:
        """The loss against the teacher, or what the columns hold of it."""
        known = teacher
        if known is None:
            kept = {name: head.share(columns[name]) for name in KEPT}
            known = TopTeacher(**kept, vocabulary=self.vocabulary or len(head.weight), tail=self._tail)
        loss, figures = distil(hidden, head, head.share(targets), known, self._how)
        loss, figures = head.total(loss), {name: head.total(value) for name, value in figures.items()}
        if teacher is not None:
            del figures["tail"]
        return Terms({"loss": Sum(loss, "tokens")}, {name: Sum(value, "tokens") for name, value in figures.items()})


build = Distill
"""The loss that a section describes."""
