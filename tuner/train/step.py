"""One optimizer step: microbatches forward and backward, one collective, clip, update; nothing waits for the device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from tuner.data.batches import Batch, StepBatches
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import local, sync_gradients
from tuner.parallel.mesh import Mesh
from tuner.runtime import phase
from tuner.train.guard import Guard
from tuner.train.norm import sum_of_squares
from tuner.train.optimizer import OptimizerSet


@dataclass(frozen=True)
class StepConfig:
    """How a forward computes: where, under which autocast, and how large a gradient may be."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    max_grad_norm: float | None
    seed: int
    mesh: Mesh


@dataclass
class TrainState:
    """What one step changes: the model, its trained parameters, their optimizer, and the guard before it."""

    root: CausalLM
    parameters: dict[str, nn.Parameter]
    optimizer: OptimizerSet
    step_config: StepConfig
    guard: Guard
    rng_start: int = 0
    """The steps behind which random numbers begin anew."""
    copied: torch.cuda.Event | None = None
    """Recorded behind a save's copies on the device, for which the next update waits there."""


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per trained token over the global batch and gradient norm before clipping.

    ``skipped`` says that the update was left out, ``halted`` that the run must end: too many steps were not finite.
    """

    loss: float
    grad_norm: float
    skipped: bool
    halted: bool
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the objective logs, each per trained token."""


class StepScalars:
    """A step's numbers on their way to the host: float64, in the order of :class:`StepResult`, figures by name last.

    On a CUDA device they travel behind the step's own work; reading them before that is done would make the host wait.
    """

    def __init__(self, values: torch.Tensor, names: Sequence[str]) -> None:
        self._host, self._done, self._names = values, None, tuple(names)
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def at_hand(self) -> bool:
        """Whether reading is free on every rank: always on a CPU, never asked of the clock on CUDA."""
        return self._done is None

    def read(self) -> StepResult:
        """The numbers; waits until the device has got there."""
        if self._done is not None:
            self._done.synchronize()
        loss, norm, skipped, halted, *figures = self._host.tolist()
        return StepResult(loss, norm, bool(skipped), bool(halted), dict(zip(self._names, figures, strict=True)))


def optimizer_step(state: TrainState, index: int, batches: StepBatches, factor: float) -> StepScalars:
    """Take step ``index`` (0-based) with every group's peak learning rate times ``factor``.

    The guard leaves the update out, on every rank, where loss or gradient norm is not finite. Reads nothing from the
    device, unless the optimizer cannot be told there to leave an update out.
    """
    loss_sum = forward_backward(state, index, batches)
    phase.enter_part(index + 1, "optimizer")
    gradients = [local(p.grad) for p in state.parameters.values() if p.grad is not None]
    squares = sum_of_squares(gradients) / state.step_config.mesh.copies
    figures = state.root.objective.take()
    sums = torch.stack([tensor.double() for tensor in (squares, loss_sum, *figures.values())])
    if dist.is_initialized():
        dist.all_reduce(sums)
    means = sums[1:] / max(1, batches.trained_count)
    values = torch.stack([means[0], sums[0].sqrt()])
    skip, halt = state.guard.judge(values)
    limit = state.step_config.max_grad_norm
    divisor = None if limit is None else ((values[1] + 1e-6) / limit).clamp_min(1.0).float()
    state.optimizer.set_factor(factor)
    if state.copied is not None:
        torch.cuda.current_stream().wait_event(state.copied)
        state.copied = None
    state.optimizer.step(skip, divisor)
    state.optimizer.zero_grad()
    return StepScalars(torch.cat([values, torch.stack([skip, halt]), means[1:]]), list(figures))


def forward_backward(state: TrainState, index: int, batches: StepBatches) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the whole global batch; return this rank's summed loss."""
    root, step_config = state.root, state.step_config
    root.train()
    loss_sum = torch.zeros((), dtype=torch.float32, device=step_config.device)
    for number, batch in enumerate(batches.micro):
        sync_gradients(root, number == len(batches.micro) - 1)
        # Dropout depends on the position in the run alone, so a resumed run needs no generator state.
        torch.manual_seed(_mixed(step_config.seed, index - state.rng_start, number, step_config.mesh.data_rank))
        phase.enter_part(index + 1, "forward")
        loss = microbatch_loss(root, batch, step_config)
        phase.enter_part(index + 1, "backward")
        (loss / max(1, batches.trained_count)).backward()
        loss_sum += loss.detach()
    return loss_sum


def microbatch_loss(root: CausalLM, batch: Batch, step_config: StepConfig) -> torch.Tensor:
    """The summed loss of one microbatch, a float32 scalar on the device."""
    targets = batch.targets[batch.trained_positions]
    arrays = (batch.input_ids, batch.position_ids, batch.trained_positions, targets)
    ids, places, positions, wanted = (to_device(array, step_config.device) for array in arrays)
    with step_config.autocast():
        loss: torch.Tensor = root(ids, places, batch.lengths, positions, wanted)
    return loss


def to_device(array: object, device: torch.device) -> torch.Tensor:
    """A host array as a tensor on the device; nothing waits for the copy."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (splitmix64 steps), well apart for neighbours."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1
