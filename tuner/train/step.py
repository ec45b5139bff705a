"""One optimizer step: microbatches forward and backward, one collective, clip, update; nothing waits for the device."""

import functools
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from tuner.data.batches import Batch, StepBatches, without_targets
from tuner.model.build import decoder_blocks
from tuner.model.output_layer import Objective, OutputLayer, Result
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import squared_norm, sum_whole_gradients, sync_gradients
from tuner.parallel.mesh import Mesh
from tuner.runtime import phase
from tuner.runtime.device import timeline_of, to_device
from tuner.train.guard import Guard
from tuner.train.methods.method import Counts, Method, Microbatch, Sum, Terms, logged
from tuner.train.optimizer import OptimizerSet

if TYPE_CHECKING:
    from tuner.model.cut import Positions
    from tuner.parallel.row_gradients import RowGradients
    from tuner.train.ema import Ema
    from tuner.train.loss_scale import LossScale
    from tuner.train.routing import Routing


@dataclass(frozen=True)
class StepConfig:
    """How a forward computes: where, under which autocast, and how large a gradient may be."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    max_grad_norm: float | None
    seed: int
    mesh: Mesh
    accumulate_whole: bool = False
    """Whether gradients stay whole until the last micro-batch of a step, in place of being reduced in each."""


@dataclass
class TrainState:
    """What one step changes: the model, its trained parameters, their optimizer, and the guard before it."""

    root: CausalLM
    parameters: dict[str, nn.Parameter]
    optimizer: OptimizerSet
    step_config: StepConfig
    guard: Guard
    method: Method
    loss_scale: "LossScale | None" = None
    """What the loss is multiplied by in the backward pass, where that computes in fp16."""
    rows: "RowGradients | None" = None
    """The gradients of embeddings that are updated row by row, which have no others."""
    rng_start: int = 0
    """The step after which random numbers were reset."""
    copied: torch.cuda.Event | None = None
    """Recorded after a save's copies on the device, for which the next update waits there."""
    ema: "Ema | None" = None
    """The average of the weights, where the recipe keeps one."""
    written: threading.Event | None = None
    """Set when a save has written what it does not copy, for which the next update waits."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that there are, by the parameter's name; of some parameters those of rows alone."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return found if self.rows is None else found | self.rows.by_name()

    def gradient_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors that gradients consist of, with their parameters' names: of rows also which ones they are."""
        found = list(self.gradients().items())
        return found if self.rows is None else [*found, *self.rows.indices()]


@dataclass(frozen=True)
class StepResult:
    """The method's loss over the global batch, such as nats per trained token, and gradient norm before clipping.

    ``skipped`` says that the update was left out, ``halted`` that the run must end: too many steps were not finite.
    """

    loss: float
    grad_norm: float
    skipped: bool
    halted: bool
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the method logs, each a mean over what it counts; under fp16 also the ``loss_scale`` of the step."""

    @property
    def overflowed(self) -> bool:
        """Whether the update was left out since gradients overflowed fp16, and the scale of the loss was lowered."""
        return "loss_scale" in self.figures and math.isfinite(self.loss) and not math.isfinite(self.grad_norm)


class StepScalars:
    """A step's numbers on their way to the host: float64, in the order of :class:`StepResult`, figures by name last.

    On a CUDA device they are copied after the step's own work; reading them before its end would make the host wait.
    ``ended`` is when the device has taken the step and copied them.
    """

    def __init__(self, values: torch.Tensor, names: Sequence[str], device: torch.device) -> None:
        self._host, self._names = values, tuple(names)
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
        timeline = timeline_of(device)
        self.ended, self._is_behind = timeline.mark(), timeline.is_behind

    @property
    def at_hand(self) -> bool:
        """Whether reading is free on every rank: always on a CPU, never asked of the clock on CUDA."""
        return not self._is_behind

    def read(self) -> StepResult:
        """The numbers; waits until the device has got there."""
        self.ended.wait()
        loss, norm, skipped, halted, *figures = self._host.tolist()
        return StepResult(loss, norm, bool(skipped), bool(halted), dict(zip(self._names, figures, strict=True)))


def optimizer_step(state: TrainState, index: int, batches: StepBatches, factor: float) -> StepScalars:
    """Take step ``index`` (0-based) with every group's peak learning rate times ``factor``.

    The guard leaves the update out, on every rank, where loss or gradient norm is not finite. Reads nothing from the
    device, unless the update is computed on the host, or the optimizer cannot leave one out on the device, or a
    parameter that is whole on several processes has no gradient on this one. Under fp16 gradients are those of the
    scaled loss until the optimizer divides them; the norm that is judged, clipped by and logged is that of the loss.
    """
    sums, counts = forward_backward(state, index, batches)
    phase.enter_part(index + 1, "optimizer")
    squares = squared_norm(list(state.gradients().values()), state.step_config.mesh)
    terms = [*sums.losses.values(), *sums.figures.values()]
    totals = torch.stack([tensor.double() for tensor in (squares, *(term.value for term in terms))])
    if dist.is_initialized():
        dist.all_reduce(totals)
        totals[1:] /= state.step_config.mesh.tensor  # who computes a layer together computes the same terms
    means = [Sum(total, term.per).mean(counts) for total, term in zip(totals[1:].unbind(), terms, strict=True)]
    if state.copied is not None:
        torch.cuda.current_stream().wait_event(state.copied)
        state.copied = None
    if state.written is not None:
        state.written.wait()
        state.written = None
    scaling = state.loss_scale
    scale = None if scaling is None else scaling.scale.clone()
    norm = totals[0].sqrt() if scale is None else totals[0].sqrt() / scale
    values = torch.stack([functools.reduce(operator.add, means[: len(sums.losses)]), norm])
    skip, halt = state.guard.judge(values, None if scaling is None else scaling.judge(values[0], values[1]))
    divisor = _divisor(norm, state.step_config.max_grad_norm, scale)
    state.optimizer.set_factor(factor)
    state.optimizer.step(skip, divisor)
    state.optimizer.zero_grad()
    if state.ema is not None:
        state.ema.update(skip)
    found = {name: mean for name, mean, term in zip(_names(sums), means, terms, strict=True) if counts[term.per]}
    names = tuple(name for name in logged(sums) if name in found)  # a mean over nothing is left out
    figures = [torch.stack([found[name] for name in names])] if names else []
    if scale is not None:
        names, figures = (*names, "loss_scale"), [*figures, scale[None]]
    return StepScalars(torch.cat([values, torch.stack([skip, halt]), *figures]), names, state.step_config.device)


def _names(terms: Terms) -> tuple[str, ...]:
    return (*terms.losses, *terms.figures)


def leave_out_step(state: TrainState) -> StepScalars:
    """Pass over a step as the recipe says: neither forward nor update, and nothing that its batches could spoil.

    Its loss and gradient norm are not numbers. What a step does not compute has no collectives, so all ranks do alike.
    """
    state.guard.leave_out()
    values = torch.tensor([math.nan, math.nan, 1.0, 0.0], dtype=torch.float64)
    return StepScalars(values, (), state.step_config.device)


def _divisor(norm: torch.Tensor, limit: float | None, scale: torch.Tensor | None) -> torch.Tensor | None:
    """What the optimizer divides the gradients by: what clipping to a norm of ``limit`` asks for, times the scale."""
    clipped = None if limit is None else ((norm + 1e-6) / limit).clamp_min(1.0).float()
    if scale is None:
        return clipped
    return scale if clipped is None else clipped * scale


def forward_backward(state: TrainState, index: int, batches: StepBatches) -> tuple[Terms, Counts]:
    """Accumulate the gradients of the loss over the whole global batch.

    Returns this rank's sums of the method's terms, and the counts of the global batch that they are divided by.
    """
    root, step_config, scaling = state.root, state.step_config, state.loss_scale
    counts, sums = state.method.counts(batches), None
    root.gradient_scale = None if scaling is None else scaling.of_term(counts)
    root.train()

    def seed(number: int) -> None:
        # Dropout depends on the position in the run alone, so a resumed run needs no generator state.
        torch.manual_seed(_mixed(step_config.seed, index - state.rng_start, number, step_config.mesh.weight_rank))

    if state.rows is not None:
        state.rows.begin(batch.input_ids for batch in batches.micro)
    shared: Mapping[str, torch.Tensor] = {}
    if state.method.mismatched:
        seed(len(batches.micro))
        phase.enter_part(index + 1, "forward")
        shared = of_step(root, state.method, batches, step_config)
    routing, known = None, None
    if root.router_loss is not None:
        from tuner.train.routing import Routing

        routing, counts = Routing(root.router_loss, step_config.mesh), Routing.with_step(counts)
        if len(batches.micro) > 1:
            phase.enter_part(index + 1, "forward")
            known = _count_first(routing, root, state.method, batches, step_config, seed)
    for number, batch in enumerate(batches.micro):
        sync_gradients(root, number == len(batches.micro) - 1, step_config.accumulate_whole)
        seed(number)
        phase.enter_part(index + 1, "forward")
        columns = None if known is None else known[number]
        terms = microbatch_terms(root, state.method, batch, step_config, shared, columns)
        if routing is not None:
            if known is None:
                routing.note(batch)
                routing.agree()
            terms = routing.with_loss(terms, batch)
        sums = terms.plus(sums)
        phase.enter_part(index + 1, "backward")
        loss = terms.loss(counts)
        loss.backward(None if scaling is None else scaling.upstream(loss))
    if step_config.mesh.weight_size > 1:
        by_rows = () if state.rows is None else state.rows
        sum_whole_gradients((p for name, p in state.parameters.items() if name not in by_rows), root.same_part)
    if step_config.mesh.is_sharded and step_config.mesh.copies > 1:
        from tuner.parallel.lookup import sum_over_copies

        sum_over_copies(root)
    if state.rows is not None:
        state.rows.sum_over_processes()
    root.sum_partial_gradients()
    assert sums is not None, "a step has at least one micro-batch"
    return sums, counts


def microbatch_terms(
    root: CausalLM,
    method: Method,
    batch: Batch,
    step_config: StepConfig,
    shared: Mapping[str, torch.Tensor] = MappingProxyType({}),
    columns: Mapping[str, torch.Tensor] | None = None,
) -> Terms:
    """The method's sums of one micro-batch, scalars on the device; ``shared`` is what :func:`of_step` gave, ``columns``
    what :func:`device_columns` did, where that was asked before."""
    columns = {**(device_columns(root, method, batch, step_config) if columns is None else columns), **shared}
    terms = _at_positions(root, method, batch, step_config, functools.partial(method.terms, columns=columns))
    return terms.over(step_config.mesh.sequence)


@torch.no_grad()
def _count_first(
    routing: "Routing",
    root: CausalLM,
    method: Method,
    batches: StepBatches,
    step_config: StepConfig,
    seed: Callable[[int], None],
) -> list[dict[str, torch.Tensor]]:
    """Have the routers choose for the whole global batch, in a forward of each micro-batch with the same dropout as the
    one that is trained. Returns the columns of each, which are computed first. Collective."""
    known = []
    for number, batch in enumerate(batches.micro):
        known.append(device_columns(root, method, batch, step_config))
        seed(number)
        with step_config.autocast():
            root(*_on_device(batch, method.positions(batch)[:0], step_config), _nothing)
        routing.note(batch)
    routing.agree()
    return known


def _nothing(hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor) -> tuple[()]:
    """The objective of a forward that is taken for what the routers choose."""
    return ()


@torch.no_grad()
def of_step(root: CausalLM, method: Method, batches: StepBatches, step_config: StepConfig) -> dict[str, torch.Tensor]:
    """What all micro-batches of a step share: the method's estimates by name, float64 scalars on the device.

    Means over the mismatched documents of the whole global batch, so the same on every rank. Collective for a method
    that has estimates; nothing for others.
    """
    if not method.mismatched:
        return {}
    sums: Terms | None = None
    for batch in batches.mismatched or [without_targets(batches.micro[0])]:  # none in a step that is made up
        columns = device_columns(root, method, batch, step_config)
        found = _at_positions(root, method, batch, step_config, functools.partial(method.estimates, columns=columns))
        sums = Terms(found, {}).over(step_config.mesh.sequence).plus(sums)
    assert sums is not None, "a step has at least one micro-batch"
    totals, counts = torch.stack([one.value.double() for one in sums.losses.values()]), method.counts(batches)
    if dist.is_initialized():
        dist.all_reduce(totals)
        totals /= step_config.mesh.tensor
    parts = zip(sums.losses.items(), totals.unbind(), strict=True)
    return {name: Sum(total, one.per).mean(counts) for (name, one), total in parts}


def device_columns(root: CausalLM, method: Method, batch: Batch, step_config: StepConfig) -> dict[str, torch.Tensor]:
    """What the method knows of one micro-batch on the device, with the reference's values where a step computes them.

    The reference is the model without its adapter, run as the model itself is a moment later, in one more forward.
    """
    columns = {name: to_device(array, step_config.device) for name, array in method.columns(batch).items()}
    if method.reference == "adapter_off":
        from tuner.model.adapter import adapter_off

        compiled = () if root.padding is None else decoder_blocks(root.model)
        with torch.no_grad(), adapter_off(root.model, compiled):
            columns |= reference_values(root, method, batch, step_config)
    return columns


def reference_values(root: CausalLM, method: Method, batch: Batch, step_config: StepConfig) -> dict[str, torch.Tensor]:
    """What a reference says of one micro-batch, ``[documents]`` by name, where the model as it is now is the reference.

    It computes as a training's forward does, in whichever mode the model is.
    """
    columns = {name: to_device(array, step_config.device) for name, array in method.columns(batch).items()}
    return _at_positions(root, method, batch, step_config, functools.partial(method.reference_values, columns=columns))


def _at_positions(
    root: CausalLM, method: Method, batch: Batch, step_config: StepConfig, objective: Objective[Result]
) -> Result:
    """What the objective makes of the positions that the method wants of one micro-batch."""
    microbatch = _on_device(batch, method.positions(batch), step_config)
    with step_config.autocast():
        return method.forward(root, microbatch, objective)


def _on_device(batch: Batch, at: npt.NDArray[np.int64], step_config: StepConfig) -> Microbatch:
    """A batch as the model takes it, with these positions of it."""
    arrays = (batch.input_ids, batch.position_ids, batch.targets[at])
    ids, places, wanted = (to_device(array, step_config.device) for array in arrays)
    return Microbatch(ids, places, batch.lengths, positions_of(at, step_config), wanted)


def positions_of(at: npt.NDArray[np.int64], step_config: StepConfig) -> "Positions":
    """Positions as the model takes them: where rows are cut, on the host, which then knows what is sent to whom."""
    return at if step_config.mesh.sequence > 1 else to_device(at, step_config.device)


def _mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (splitmix64 steps), well apart for neighbours."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1
