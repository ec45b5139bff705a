"""What some trainings add to a step. ``optimizer_step`` and ``forward_backward`` ask each part in the order of
``TrainState.parts``, on every rank alike; a part may be collective wherever it is asked."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tuner.data.batches import Batch, StepBatches
from tuner.train.methods.method import Counts, Terms


@dataclass(frozen=True)
class StepForwards:
    """The forwards of a step, before the first of them."""

    batches: StepBatches
    forward: Callable[[int], None]
    """Computes a micro-batch, by its number, up to its last hidden states, with the dropout that it is trained with."""


class StepPart:
    """One thing that some trainings do in a step. What a part does not say is left as it is."""

    def counts(self, counts: Counts) -> Counts:
        """By what the step's sums are divided, over the global batch."""
        return counts

    def before_forward(self, step: StepForwards) -> None:
        """The step begins; gradients are zero."""

    def terms(self, batch: Batch, terms: Terms) -> Terms:
        """The sums of a micro-batch whose forward was the last that the model did; its backward pass is next."""
        return terms

    def after_backward(self) -> None:
        """All micro-batches' backward passes are done: the part adds up its own gradients, and hands on all others."""

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Those of parameters that have none of their own (``grad``), by name, one row of a gradient only once."""
        return {}

    def owns(self, name: str) -> bool:
        """Whether the gradient of a parameter is the part's, in this step or another."""
        return False

    def gradient_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """What these gradients take memory with, by parameters' names."""
        return list(self.gradients().items())

    def after_update(self, skip: torch.Tensor) -> None:
        """The parameters are updated, unless ``skip``, a boolean scalar on the device."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The part's state, by the names that checkpoints have for it."""
        return {}

    def restart(self) -> None:
        """The weights are a checkpoint's that has no state of the part."""

    def other_weights(self) -> Mapping[str, AbstractContextManager[None]]:
        """Weights to evaluate besides those that are trained, by how their figures' names begin; they are in the place
        of the trained ones within."""
        return {}


class Overflow(NamedTuple):
    """What the gradients of a step say of the scale, boolean scalars on the device, the same on every rank."""

    here: torch.Tensor
    """The scale is too large: the update is left out."""
    at_floor: torch.Tensor
    """It is, and cannot be smaller."""


class NoLossScale:
    """What a step asks of a loss scale, where the loss is as it is: in types that reach as far as float32."""

    def begin(self, counts: Counts) -> None:
        """A step begins whose sums are divided by the ``counts``; known before the forward pass."""

    def upstream(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the backward pass of a step's ``loss`` starts from; None for one."""
        return None

    def of_gradients(self) -> torch.Tensor:
        """How many times as large gradients are before the update as those of the loss, a scalar."""
        return torch.ones(())

    def norm(self, squares: torch.Tensor) -> torch.Tensor:
        """The gradient norm of the loss, from the sum of squares of what the backward passes left."""
        return squares.sqrt()

    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> Overflow | None:
        """Take a step's loss and gradient norm into account; None where there is no scale that they speak of."""
        return None

    def divisor(self, clipping: torch.Tensor | None) -> torch.Tensor | None:
        """What gradients are divided by in the update, given what clipping asks for; None for nothing."""
        return clipping

    def figures(self) -> Mapping[str, torch.Tensor]:
        """What the step logs of it."""
        return {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Its state, by the names that checkpoints have for it."""
        return {}


class SaveFence:
    """What an update waits for while a save runs beside training: it must not change what is still being read."""

    def __init__(self) -> None:
        self._copied: torch.cuda.Event | None = None
        self._written: threading.Event | None = None

    def set(self, copied: torch.cuda.Event | None, written: threading.Event | None) -> None:
        """Have the next update wait: on the device for the copies that it makes there, on the host for what the save
        writes from where it lies."""
        self._copied, self._written = copied, written

    def wait(self) -> None:
        """Return when nothing is read any more that an update changes; the device waits for its copies by itself."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        if self._written is not None:
            self._written.wait()
        self._copied = self._written = None
