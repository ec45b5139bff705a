"""One optimizer step: micro-batches forward and backward, one collective, clip, update. The host waits for the device
in the three cases that :func:`optimizer_step` names, and in no other."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from tuner.data.batches import Batch, StepBatches, without_targets
from tuner.model.build import decoder_blocks
from tuner.model.output_layer import Objective, Result, no_objective
from tuner.model.root import CausalLM
from tuner.model.row_layout import Positions
from tuner.parallel.fsdp import squared_norm, sum_whole_gradients, sync_gradients
from tuner.parallel.mesh import Mesh
from tuner.runtime import phase
from tuner.runtime.device import timeline_of, to_device
from tuner.train.guard import Guard
from tuner.train.methods.method import Counts, Method, Microbatch, Sum, Terms, logged
from tuner.train.optimizer import OptimizerSet
from tuner.train.step_parts import NoLossScale, SaveFence, StepForwards, StepPart

Kind = TypeVar("Kind", bound=StepPart)


@dataclass(frozen=True)
class StepConfig:
    """How a forward computes: where, under which autocast, and how large a gradient may be."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    max_grad_norm: float | None
    seed: int
    mesh: Mesh
    accumulate_whole: bool = False
    """Whether gradients are accumulated unsharded and reduced in the last micro-batch alone, as under ``no_sync``."""


@dataclass
class TrainState:
    """What one step changes: the model, its trained parameters, their optimizer, and the guard before it."""

    root: CausalLM
    parameters: dict[str, nn.Parameter]
    optimizer: OptimizerSet
    step_config: StepConfig
    guard: Guard
    method: Method
    scaling: NoLossScale = field(default_factory=NoLossScale)
    """What the loss is multiplied by in the backward pass, where that computes in fp16."""
    parts: tuple[StepPart, ...] = ()
    """What this training does in a step in addition."""
    rng_start: int = 0
    """The step after which random numbers were reset."""
    fence: SaveFence = field(default_factory=SaveFence)
    """The save that may still read the parameters, which the next update waits for: on CUDA on the device alone."""

    def part(self, kind: type[Kind]) -> Kind | None:
        """The part of a kind, where this training has it."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that there are, by the parameter's name; those that are a part's as it has them."""
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for part in self.parts:
            found |= part.gradients()
        return found

    def gradient_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors that gradients consist of, with their parameters' names."""
        found = [(name, p.grad) for name, p in self.parameters.items() if p.grad is not None]
        return [*found, *(tensor for part in self.parts for tensor in part.gradient_tensors())]

    def tensors(self) -> dict[str, torch.Tensor]:
        """What scale and parts keep from step to step, by the names that checkpoints have for it."""
        kept = (self.scaling.tensors(), *(part.tensors() for part in self.parts))
        return {name: tensor for own in kept for name, tensor in own.items()}


@dataclass(frozen=True)
class StepResult:
    """The method's loss over the global batch, such as nats per trained token, and gradient norm before clipping.

    ``skipped`` says that there was no update, by the guard or by the recipe; ``halted``: the run must end, since more
    of its steps were not finite than the recipe allows.
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
            # Page-locked, so that the copy is the device's alone: the host queues the next step meanwhile.
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
        timeline = timeline_of(device)
        self.ended, self._is_asynchronous = timeline.mark(), timeline.is_asynchronous

    @property
    def reads_without_sync(self) -> bool:
        """Whether :meth:`read` never waits: true on a CPU. False on CUDA even once the step ended: when that is
        seen would differ from rank to rank, and ranks must read in the same step."""
        return not self._is_asynchronous

    def read(self) -> StepResult:
        """The numbers; waits until the device has got there."""
        self.ended.wait()
        loss, norm, skipped, halted, *figures = self._host.tolist()
        return StepResult(loss, norm, bool(skipped), bool(halted), dict(zip(self._names, figures, strict=True)))


def optimizer_step(state: TrainState, index: int, batches: StepBatches, factor: float) -> StepScalars:
    """Take step ``index`` (0-based) with every group's peak learning rate times ``factor``.

    The guard rejects the update, on every rank, where loss or gradient norm is not finite. The host waits
    for the device in three cases: the update is computed on the host; an optimizer of the user's own takes no flag; a
    parameter that is whole on several processes has no gradient on this one. Under fp16 gradients are those of the
    scaled loss until the optimizer divides them; the norm that is judged, clipped by and logged is that of the loss.
    """
    sums, counts = forward_backward(state, index, batches)
    phase.enter_part(index + 1, "optimizer")
    # The norm and every term in one all-reduce: on each rank they are the same bits, so all ranks decide alike.
    # The norm's part is a sum of squares, divided by how many processes hold the same numbers: the root comes last.
    squares = squared_norm(list(state.gradients().values()), state.step_config.mesh).to(state.step_config.device)
    terms = sums.losses | sums.figures
    # float64: a sum over thousands of ranks and millions of tokens keeps what float32 would round away.
    totals = torch.stack([tensor.double() for tensor in (squares, *(term.value for term in terms.values()))])
    if dist.is_initialized():
        dist.all_reduce(totals)
        # Tensor-parallel ranks have identical terms, so the sum is divided by their number; sequence-parallel ranks,
        # which share a row, have divided theirs before (`Terms.shared_by`).
        totals[1:] /= state.step_config.mesh.tensor
    pairs = zip(terms.items(), totals[1:].unbind(), strict=True)
    means = {name: Sum(total, term.per).mean(counts) for (name, term), total in pairs}
    # This step writes from here on what a save beside training may still be reading: the scale, then the parameters.
    state.fence.wait()
    norm = state.scaling.norm(totals[0])
    values = torch.stack([functools.reduce(operator.add, (means[name] for name in sums.losses)), norm])
    # `norm` divided by the scale of this step's losses; `judge` may set another one, for the next step.
    skip, halt = state.guard.judge(values, state.scaling.judge(values[0], norm))
    state.optimizer.set_factor(factor)
    # `skip` stays on the device, as what kernels call `found_inf`: nobody waits to learn whether there was an update.
    state.optimizer.step(skip, state.scaling.divisor(_clipping(norm, state.step_config.max_grad_norm)))
    state.optimizer.zero_grad()  # to None: the memory is free until the next backward pass
    for part in state.parts:
        part.after_update(skip)
    figures = {name: means[name] for name in logged(sums) if counts[terms[name].per]}  # not a mean over nothing
    figures |= state.scaling.figures()
    reported = torch.cat([values, torch.stack([skip, halt]), *(figure[None] for figure in figures.values())])
    return StepScalars(reported, tuple(figures), state.step_config.device)


def skip_step(state: TrainState) -> StepScalars:
    """Skip a step as the recipe says: neither forward nor update, and nothing that its batches could spoil.

    Its loss and gradient norm are NaN. Every rank skips the same steps, so no collective lacks a partner; nothing is
    written that a save could read, so none is waited for.
    """
    state.guard.skip()
    values = torch.tensor([math.nan, math.nan, 1.0, 0.0], dtype=torch.float64)
    return StepScalars(values, (), state.step_config.device)


def _clipping(norm: torch.Tensor, limit: float | None) -> torch.Tensor | None:
    """What clipping gradients of this norm to one of ``limit`` divides them by; None where they are not clipped."""
    # torch.nn.utils.clip_grad_norm_'s epsilon; float32, as kernels take a scale.
    return None if limit is None else ((norm + 1e-6) / limit).clamp_min(1.0).float()


def forward_backward(state: TrainState, index: int, batches: StepBatches) -> tuple[Terms, Counts]:
    """Accumulate the gradients of the loss over the whole global batch.

    Returns this rank's sums of the method's terms, and the counts of the global batch that they are divided by.
    """
    root, step_config = state.root, state.step_config
    # Those of the global batch: each rank collates its own rows, and counts all, so that nothing is communicated.
    counts, sums = state.method.counts(batches), None
    state.scaling.begin(counts)  # before any forward: the output layer computes its gradient in the forward pass
    root.train()  # an evaluation or a probe may have come in between
    for part in state.parts:
        counts = part.counts(counts)
    columns: dict[int, dict[str, torch.Tensor]] = {}

    def seed(number: int) -> None:
        # From step, micro-batch and rank, so that a resumed run needs no generator state. Tensor-parallel ranks compute
        # the same numbers and share a seed; sequence-parallel ranks have other positions, and another seed.
        drawn = _mixed(step_config.seed, index - state.rng_start, number, step_config.mesh.weight_rank)
        torch.default_generator.manual_seed(drawn)  # torch.manual_seed formats a stack for each kind of device, too
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(drawn)

    def forward_to_hidden(number: int) -> None:
        batch = batches.micro[number]
        if not columns:
            phase.enter_part(index + 1, "forward")
        columns[number] = device_columns(root, state.method, batch, step_config)
        seed(number)
        with step_config.autocast():
            root(*on_device(batch, state.method.positions(batch)[:0], step_config), no_objective)

    for part in state.parts:
        part.before_forward(StepForwards(batches, forward_to_hidden))
    shared: Mapping[str, torch.Tensor] = {}
    if state.method.mismatched:
        seed(len(batches.micro))
        phase.enter_part(index + 1, "forward")
        shared = step_estimates(root, state.method, batches, step_config)
    for number, batch in enumerate(batches.micro):
        # FSDP2 reduces gradients in the last backward pass of a step alone where they are kept whole until then.
        sync_gradients(root, number == len(batches.micro) - 1, step_config.accumulate_whole)
        seed(number)
        phase.enter_part(index + 1, "forward")
        terms = microbatch_terms(root, state.method, batch, step_config, shared, columns.pop(number, None))
        for part in state.parts:
            terms = part.terms(batch, terms)
        sums = terms.plus(sums)
        phase.enter_part(index + 1, "backward")
        # Divided by the counts of the global batch, so that micro-batches add up to the mean over all of it.
        loss = terms.loss(counts)
        loss.backward(state.scaling.upstream(loss))
    _sum_over_processes(state)
    assert sums is not None, "a step has at least one micro-batch"
    return sums, counts


def _sum_over_processes(state: TrainState) -> None:
    """Add up the gradients that FSDP2 does not: of step parts, of whole parameters, over copies, of partial layers.

    All are sums, so their order does not change the result; it must only be the same on every rank.
    """
    root, mesh = state.root, state.step_config.mesh
    for part in state.parts:
        part.after_backward()
    if mesh.weight_size > 1:
        own = (p for name, p in state.parameters.items() if not any(part.owns(name) for part in state.parts))
        sum_whole_gradients(own, root.parts.data_mesh)
    if mesh.is_sharded and mesh.copies > 1:
        from tuner.parallel.lookup import sum_over_copies

        sum_over_copies(root)
    root.parts.sum_partial_gradients()


def microbatch_terms(
    root: CausalLM, method: Method, batch: Batch, step_config: StepConfig,
    shared: Mapping[str, torch.Tensor] = MappingProxyType({}), columns: Mapping[str, torch.Tensor] | None = None,
) -> Terms:
    """The method's sums of one micro-batch, scalars on the device; ``shared`` is what :func:`step_estimates`
    gave, ``columns`` what :func:`device_columns` did, where that was asked before."""
    columns = {**(device_columns(root, method, batch, step_config) if columns is None else columns), **shared}
    terms = _at_positions(root, method, batch, step_config, functools.partial(method.terms, columns=columns))
    return terms.shared_by(step_config.mesh.sequence)


@torch.no_grad()
def step_estimates(
    root: CausalLM, method: Method, batches: StepBatches, step_config: StepConfig
) -> dict[str, torch.Tensor]:
    """What all micro-batches of a step share: the method's estimates by name (KTO's of the KL), float64 scalars.

    Means over the mismatched documents of the whole global batch, so the same on every rank. Collective for a method
    that has estimates; nothing for others.
    """
    if not method.mismatched:
        return {}
    sums: Terms | None = None
    for batch in batches.mismatched or [without_targets(batches.micro[0])]:  # none in a step that is made up
        columns = device_columns(root, method, batch, step_config)
        found = _at_positions(root, method, batch, step_config, functools.partial(method.estimates, columns=columns))
        sums = Terms(found, {}).shared_by(step_config.mesh.sequence).plus(sums)
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

        compiled = () if root.parts.padding is None else decoder_blocks(root.model)
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
    microbatch = on_device(batch, method.positions(batch), step_config)
    with step_config.autocast():
        return method.forward(root, microbatch, objective)


def on_device(batch: Batch, at: npt.NDArray[np.int64], step_config: StepConfig) -> Microbatch:
    """A batch as the model takes it, with these positions of it."""
    arrays = (batch.input_ids, batch.position_ids, batch.targets[at])
    ids, places, wanted = (to_device(array, step_config.device) for array in arrays)
    return Microbatch(ids, places, batch.lengths, positions_of(at, step_config), wanted)


def positions_of(at: npt.NDArray[np.int64], step_config: StepConfig) -> Positions:
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
