"""What a method is: the losses of a micro-batch as sums, and what they are divided by over the whole global batch."""

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tuner.config import methods
from tuner.config.methods import CustomMethod
from tuner.data.batches import Batch, StepBatches
from tuner.errors import PluginError
from tuner.model.output_layer import LogitTransform, Objective, OutputLayer, Result
from tuner.model.root import CausalLM
from tuner.model.row_layout import Positions

Counts = Mapping[str, float]
"""How much there is of something (`tokens`, `documents`) in a whole global batch, known on the host."""
DeviceColumns = Mapping[str, torch.Tensor]
"""What a method knows of a micro-batch besides its tokens, by name, on the device."""


class Sum(NamedTuple):
    """A sum over a micro-batch, a scalar on the device, and the name of the count that it is divided by."""

    value: torch.Tensor
    per: str

    def mean(self, counts: Counts) -> torch.Tensor:
        """Its share of the mean over the global batch; that of nothing is the sum itself, a zero."""
        return self.value / (counts[self.per] or 1)


Sums = dict[str, Sum]
"""Sums by name."""


class Microbatch(NamedTuple):
    """What a model's forward takes of a micro-batch besides the objective, on the device: see :class:`CausalLM`."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    document_lengths: tuple[int, ...]
    positions: Positions
    targets: torch.Tensor


class Terms(NamedTuple):
    """A micro-batch's part of the loss, by name, and of figures that are logged with it, which have no gradient.

    The loss of a step is the sum of its terms' means. A tuple of dicts, since FSDP2 finds tensors in nothing else.
    """

    losses: Sums
    figures: Sums

    def loss(self, counts: Counts) -> torch.Tensor:
        """What the backward pass starts from: the sums over the micro-batch, divided by the global batch's counts."""
        return functools.reduce(operator.add, (one.mean(counts) for one in self.losses.values()))

    def shared_by(self, processes: int) -> "Terms":
        """This process's share of terms that so many processes compute alike, each from gradients that are added up."""
        if processes == 1:
            return self
        losses, figures = ({n: Sum(one.value / processes, one.per) for n, one in terms.items()} for terms in self)
        return Terms(losses, figures)

    def plus(self, other: "Terms | None") -> "Terms":
        """The sums over this and what came before it, without gradients."""
        earlier = Terms({}, {}) if other is None else other
        return Terms(_added(earlier.losses, self.losses), _added(earlier.figures, self.figures))


def _added(earlier: Sums, new: Sums) -> Sums:
    detached = {name: Sum(one.value.detach(), one.per) for name, one in new.items()}
    return {n: Sum(earlier[n].value + one.value, one.per) if n in earlier else one for n, one in detached.items()}


def logged(terms: Terms) -> tuple[str, ...]:
    """What a step's line has besides its loss: the losses by name where there are several, and the figures.

    A method's only loss has no name of its own next to the router's, with which it adds up to that of the step.
    """
    several = [name for name in terms.losses if name != "loss"] if len(terms.losses) > 1 else []
    return (*several, *terms.figures)


class Method(ABC):
    """A loss, from what it sees of a global batch on the host to what it computes of a micro-batch on the device."""

    by_document: bool = False
    """Whether :meth:`counts` reads ``trained_per_document`` of the global batch."""
    by_terms: bool = False
    """Whether an evaluation measures this method's terms, and not the cross-entropy of the trained tokens."""
    reference: Literal["none", "columns", "adapter_off"] = "none"
    """Where :meth:`reference_values` come from: they are not asked for; they were computed by the model at the start of
    the run and are columns of the documents; or they are computed before each micro-batch, without the adapter."""

    teacher: CausalLM | None = None
    """A frozen model that a method learns from: whoever builds the run gives it to a method that asks for one."""

    def forward(self, root: CausalLM, microbatch: Microbatch, objective: Objective[Result]) -> Result:
        """What the objective, such as :meth:`terms`, makes of a micro-batch: the model's forward."""
        result: Result = root(*microbatch, objective)
        return result

    @property
    def mismatched(self) -> bool:
        """Whether a step has mismatched documents, each a prompt with the answer to another, for :meth:`estimates`."""
        return False

    def positions(self, batch: Batch) -> npt.NDArray[np.int64]:
        """int64[N]: where :meth:`terms` wants hidden states; by default the positions whose next token is trained."""
        return batch.trained_positions

    def reference_values(
        self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns
    ) -> dict[str, torch.Tensor]:
        """Of the reference model, without gradients: by name what :meth:`terms` finds in its columns, ``[documents]``
        each. Shapes as for :meth:`terms`."""
        return {}

    def estimates(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Sums:
        """Sums over a micro-batch of mismatched documents, taken before a step's first forward and without gradients:
        :meth:`terms` finds their means over the whole global batch in its columns. Shapes as for :meth:`terms`."""
        return {}

    @property
    def extra_forwards(self) -> int:
        """Forwards without gradients that a step takes of each micro-batch, besides the one that is trained."""
        return 1 if self.reference == "adapter_off" else 0

    def made_up(self, batch: Batch) -> Batch:
        """The batch with what :meth:`columns` reads of it besides its tokens, made up where it is not there.

        Memory is tried and predicted with it: types and shapes count, values do not.
        """
        return batch

    @abstractmethod
    def counts(self, batches: StepBatches) -> Counts:
        """The global batch's counts by which sums are divided; the same on every rank, so none is communicated.

        Those of two sets of documents are the sum of both: an evaluation adds them up, source by source.
        """

    @abstractmethod
    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[np.generic]]:
        """What goes to the device with a micro-batch besides its tokens: which document each trained position belongs
        to, weights of positions, figures of another model. No documents, no entries."""

    @abstractmethod
    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The sums of a micro-batch, inside the model's forward: the same names each time, and no read of the device.

        Shapes: hidden ``[N, D]`` at the N trained positions, targets int64 ``[N]``. N may be 0, and the losses must
        then be zeros that have a gradient. Where rows are cut over processes, hidden is a share ``[n, D]`` of it, and
        what the head gives is of all positions (:meth:`~tuner.model.output_layer.OutputLayer.share` for the rest).
        """


def build_method(section: methods.Method) -> Method:
    """The method of a section: what ``build`` of the file named as its kind makes of it.

    Raises PluginError for code of the user's own that is not there or fails.
    """
    method: Method = import_module(f"tuner.train.methods.{section.kind}").build(section)
    return method


def check_method(section: methods.Method) -> None:
    """Load a loss of the user's own and check its signature. Raises PluginError; nothing is called."""
    if isinstance(section, CustomMethod):
        import_module(f"tuner.train.methods.{section.kind}").factory_of(section)


def check_logits(section: methods.Method, transform: LogitTransform) -> None:
    """Raise PluginError for a loss of the user's own on a model that caps its logits, of which it could not know."""
    if isinstance(section, CustomMethod) and transform.cap is not None:
        raise PluginError(
            f"method.use {section.use}: this model caps its logits, which a loss of your own would not see",
            hint="take another model, or method.kind: sft or pretrain",
        )
