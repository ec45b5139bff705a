"""Distillation: the student learns a teacher's distribution of every trained token, and with ``ce_weight`` the data.

The loss is :mod:`tuner.model.divergence`'s, its mean over the trained tokens of the global batch. The teacher is in
memory, and runs on the same packed rows just before the student, or its most probable tokens are columns of the rows.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy.typing as npt
import torch

from tuner.config.methods import DistillMethod
from tuner.data.batches import Batch, StepBatches
from tuner.model.divergence import Distillation, Tail, Teacher, TopTeacher, WholeTeacher, distil
from tuner.model.output_layer import Objective, OutputLayer, Result
from tuner.model.root import CausalLM
from tuner.train.methods.method import Counts, Method, Microbatch, Sum, Terms

TEACHER = "teacher_"
"""What the names of the columns of a teacher's tokens begin with."""


class Distill(Method):
    """The mean over trained tokens of their divergence from the teacher's distribution."""

    by_terms = True

    def __init__(self, section: DistillMethod) -> None:
        self._how = Distillation(section.beta, section.temperature, section.ce_weight)
        self._tail: Tail = section.tail

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
        return {}

    def terms(
        self,
        hidden: torch.Tensor,
        head: OutputLayer,
        targets: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        teacher: Teacher | None = None,
    ) -> Terms:
        """The loss against the teacher, or what the columns hold of it."""
        known = teacher if teacher is not None else self._kept(columns)
        loss, figures = distil(hidden, head, targets, known, self._how)
        if teacher is not None:
            del figures["tail"]
        return Terms({"loss": Sum(loss, "tokens")}, {name: Sum(value, "tokens") for name, value in figures.items()})

    def _kept(self, columns: Mapping[str, torch.Tensor]) -> TopTeacher:
        raise NotImplementedError


def build(section: DistillMethod) -> Distill:
    """The loss that the section describes; a teacher in memory is given to it afterwards."""
    return Distill(section)
