"""A loss of the user's own: a function of hidden states and targets, or a whole method; its mistakes are named."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
import torch

from tuner.config.methods import CustomMethod
from tuner.config.recipe import STEP_FIGURES
from tuner.data.batches import Batch, StepBatches
from tuner.errors import PluginError, TunerError
from tuner.model.output_layer import OutputLayer
from tuner.runtime.plugins import Plugin, load, naming, require_call, source_file
from tuner.train.methods.method import Counts, DeviceColumns, Method, Sum, Terms, logged
from tuner.train.methods.pretrain import LossAndFigures, TokenMean

LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], LossAndFigures]
"""From hidden states ``[N, D]``, the output layer's weight ``[V, D]`` and bias ``[V]`` or None, and targets int64
``[N]``: the sum of the losses at the N trained positions (a scalar with a gradient, also for N = 0) and named sums."""
TAKEN = ("step", "loss", "skipped", "kind", "overflow", "reason", *STEP_FIGURES)
"""Keys of a line of metrics.jsonl that a figure cannot have."""


def token_mean(function: LossFunction, name: str) -> TokenMean:
    """The method of a loss function. It raises PluginError for a result that :data:`LossFunction` is not.

    The function knows no factor of the logits, which is put into what it is given; a model with a cap is refused at
    start.
    """

    def loss(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> LossAndFigures:
        bias, scale = head.bias, head.transform.scale
        if scale != 1:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        result = function(hidden, head.weight, bias, head.share(targets))
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise PluginError(f"{name} returned no pair of a loss and a mapping", hint="return loss, {}")
        found, figures = result
        return head.total(found), {figure: head.total(value) for figure, value in figures.items()}

    return TokenMean(loss)


@runtime_checkable
class OwnMethod(Protocol):
    """What a method of the user's own has at least: the members of :class:`Method` without a default, and one more."""

    by_document: bool

    def counts(self, batches: StepBatches) -> Counts:
        """As :meth:`Method.counts`."""
        ...

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """As :meth:`Method.columns`."""
        ...

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """As :meth:`Method.terms`."""
        ...


class Checked(Method):
    """A method of the user's own; what it raises, and what it returns that no method may, is a PluginError."""

    def __init__(self, method: OwnMethod, name: str, file: Path | None = None, takes_share: bool = False) -> None:
        self._method, self._name, self._file = method, name, file
        self._takes_share = takes_share
        self._names: tuple[str, ...] | None = None
        self._counted: Counts = {}
        self.by_document = method.by_document

    def counts(self, batches: StepBatches) -> Counts:
        """The method's own, or PluginError."""
        with self._named():
            self._counted = self._method.counts(batches)
        return self._counted

    def columns(self, batch: Batch) -> Mapping[str, npt.NDArray[Any]]:
        """The method's own, or PluginError."""
        with self._named():
            return self._method.columns(batch)

    def terms(self, hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, columns: DeviceColumns) -> Terms:
        """The method's own, or PluginError. It gets all hidden states, where rows are cut over processes."""
        if not self._takes_share:
            hidden, head = head.join(hidden), head.of_one
        with self._named():
            found = self._method.terms(hidden, head, targets, columns)
        if not isinstance(found, Terms) or not found.losses:
            raise PluginError(f"{self._name} returned a {type(found).__name__} without losses", hint="return Terms")
        self._check_sums(found)
        self._check_names(found)
        losses = {name: Sum(one.value.float(), one.per) for name, one in found.losses.items()}
        return Terms(losses, {name: Sum(one.value.detach(), one.per) for name, one in found.figures.items()})

    def _named(self) -> AbstractContextManager[None]:
        return naming(f"{self._name} failed", self._file, (TunerError,))

    def _check_sums(self, found: Terms) -> None:
        for name, one in {**found.figures, **found.losses}.items():
            if one.per not in self._counted:
                raise PluginError(f"{self._name}: {name} is per {one.per}, of which there is no count")
            if not isinstance(one.value, torch.Tensor) or one.value.ndim:
                shown = "the loss" if name == "loss" else name
                raise PluginError(f"{self._name}: {shown} is no scalar tensor", hint="sum over the positions")

    def _check_names(self, found: Terms) -> None:
        names = logged(found)
        if self._names is not None and names != self._names:
            raise PluginError(f"{self._name} returned the figures {names}, and {self._names} before")
        if self._names is None and (
            clash := sorted(set(names) & set(TAKEN)) or sorted(name for name, n in Counter(names).items() if n > 1)
        ):
            raise PluginError(f"{self._name}: the figure {clash[0]} has the name of another", hint="rename it")
        self._names = names


def build(section: CustomMethod) -> Method:
    """Call ``use`` with the options: it gives a loss function or a method. Raises PluginError where it cannot."""
    factory = factory_of(section)
    with naming(f"method.use {section.use}", source_file(factory)):
        found, takes_share = factory(**section.options), False
    if not isinstance(found, OwnMethod):
        if not callable(found):
            raise PluginError(
                f"method.use {section.use} gave a {type(found).__name__}, not a loss function",
                hint="nor has it all that a method has: by_document, counts, columns and terms",
            )
        found, takes_share = token_mean(found, section.use), True
    return Checked(found, section.use, source_file(factory), takes_share)


def factory_of(section: CustomMethod) -> Plugin:
    """What ``use`` names, once it is seen to take the options. Raises PluginError."""
    factory = load(section.use, "tuner.methods")
    require_call(factory, section.use, (), section.options)
    return factory
