"""One optimizer step: microbatches forward and backward, one collective, clip, update."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from tuner.data.batches import Batch, StepBatches
from tuner.errors import DivergedError
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import local, sync_gradients
from tuner.train.optimizer import Updater


@dataclass(frozen=True)
class Numerics:
    """How a forward computes: where, under which autocast, and how large a gradient may be."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[object]]
    max_grad_norm: float | None
    seed: int
    rank: int


@dataclass
class Learner:
    """What one step changes: the model, its trained parameters and their optimizer."""

    root: CausalLM
    parameters: dict[str, nn.Parameter]
    optimizer: Updater
    numerics: Numerics
    marks: Callable[[str], None] = field(default=lambda part: None)
    """Called as each part of a step begins: forward, backward, optimizer. Measuring tools set it."""


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per trained token over the global batch, gradient norm before clipping, the ranks' agreed wishes."""

    loss: float
    grad_norm: float
    wishes: tuple[bool, ...]


def optimizer_step(
    learner: Learner, index: int, batches: StepBatches, factor: float, wishes: tuple[bool, ...]
) -> StepResult:
    """Take step ``index`` (0-based) at the peak learning rates times ``factor``.

    ``wishes`` (stop, save, ...) come back true when any rank had them true.

    Raises DivergedError on every rank, before the update, when the loss or the gradient norm is not finite.
    """
    loss_sum = _forward_backward(learner, index, batches)
    learner.marks("optimizer")
    gradients = [local(p.grad) for p in learner.parameters.values() if p.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    agreed = torch.stack([loss_sum.double(), squares.double(), *(squares.new_tensor(w).double() for w in wishes)])
    if dist.is_initialized():
        dist.all_reduce(agreed)
    total, square, *votes = agreed.tolist()
    loss, norm = total / max(1, batches.trained_count), square**0.5
    if not (math.isfinite(loss) and math.isfinite(norm)):
        rows = ", ".join(map(str, batches.row_ids[:8].tolist())) + (", ..." if len(batches.row_ids) > 8 else "")
        raise DivergedError(
            f"step {index + 1}: loss {loss}, gradient norm {norm}; rows {rows}",
            hint="lower optimizer.lr, lengthen schedule.warmup, or look at these rows",
        )
    limit = learner.numerics.max_grad_norm
    if limit is not None and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
    learner.optimizer.set_factor(factor)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    return StepResult(loss, norm, tuple(vote > 0 for vote in votes))


def _forward_backward(learner: Learner, index: int, batches: StepBatches) -> torch.Tensor:
    """Accumulate the gradients of the mean loss over the whole global batch; return this rank's summed loss."""
    root, numerics = learner.root, learner.numerics
    root.train()
    loss_sum = torch.zeros((), dtype=torch.float32, device=numerics.device)
    for number, batch in enumerate(batches.micro):
        sync_gradients(root, number == len(batches.micro) - 1)
        # Dropout depends on the position in the run alone, so a resumed run needs no generator state.
        torch.manual_seed(_mixed(numerics.seed, index, number, numerics.rank))
        learner.marks("forward")
        loss = microbatch_loss(root, batch, numerics)
        learner.marks("backward")
        (loss / max(1, batches.trained_count)).backward()
        loss_sum += loss.detach()
    return loss_sum


def microbatch_loss(root: CausalLM, batch: Batch, numerics: Numerics) -> torch.Tensor:
    """The summed loss of one microbatch, a float32 scalar on the device."""

    def on_device(array: object) -> torch.Tensor:
        tensor = torch.as_tensor(array)
        return tensor.pin_memory().to(numerics.device, non_blocking=True) if numerics.device.type == "cuda" else tensor

    targets = batch.targets[batch.trained_positions]
    with numerics.autocast():
        loss: torch.Tensor = root(
            on_device(batch.input_ids),
            on_device(batch.position_ids),
            batch.lengths,
            on_device(batch.trained_positions),
            on_device(targets),
        )
    return loss


def _mixed(*numbers: int) -> int:
    """One 63-bit seed from several numbers (splitmix64 steps), well apart for neighbours."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state >> 1
