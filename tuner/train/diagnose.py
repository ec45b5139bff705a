"""Which module made a step's numbers not finite: the step is run again under observation."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from tuner.data.batches import StepBatches
from tuner.errors import DivergedError
from tuner.runtime.parts import local
from tuner.runtime.process import Collective, gloo_group
from tuner.train.step import StepResult, TrainState, forward_backward
from tuner.train.tasks import TakenStep

SHOWN_ROWS = 8


class Stage(IntEnum):
    """When in a step a value was seen, in the order in which one bad value causes the next."""

    OUTPUT = 0
    LOSS = 1
    GRADIENT = 2
    REDUCED = 3
    """A parameter's gradient, into which every rank's went: the cause may lie elsewhere."""


@dataclass(frozen=True)
class Finding:
    """What was first not finite on a rank."""

    stage: Stage
    what: str


def diverged(state: TrainState, taken: TakenStep, result: StepResult, last_saved: str | None) -> DivergedError:
    """The error of a step that halted the run, naming step, rows, and the first bad module and its rank. Collective."""
    finding = first_bad(state, taken.index, taken.batches)  # collective under FSDP, so before the ranks speak of it
    everywhere = Collective(gloo_group()).on_all_ranks(lambda: finding)
    found = [(item.stage, rank, item.what) for rank, item in enumerate(everywhere) if item is not None]
    _, rank, where = min(found, default=(None, 0, "nothing when the step was run again"))
    where = f"rank {rank}, {where}" if found and len(everywhere) > 1 else where
    floor = " with the loss multiplied by 1, the least that fp16 is tried with" if result.overflowed else ""
    rows = ", ".join(map(str, taken.batches.row_ids[:SHOWN_ROWS].tolist()))
    more = ", ..." if len(taken.batches.row_ids) > SHOWN_ROWS else ""
    return DivergedError(
        f"step {taken.index + 1}: loss {result.loss}, gradient norm {result.grad_norm}{floor}; first not finite: "
        f"{where}; rows {rows}{more}; nothing was updated",
        hint="lower optimizer.lr, lengthen schedule.warmup, or look at these rows; "
        + ("fp16 has no number above 65,504: train.precision: fp32 or bf16 has; " if state.scaling.tensors() else "")
        + (f"the last checkpoint is {last_saved}" if last_saved else "no checkpoint was saved yet"),
    )


def first_bad(state: TrainState, index: int, batches: StepBatches) -> Finding | None:
    """Run forward and backward of step ``index`` (from 0) again, and name what was first not finite on this rank.

    Nothing is updated.

    In the forward pass it is the innermost module whose output is the first that is not finite; else the loss, else the
    first gradient of a module's output in the order of the backward pass, else a parameter's gradient.
    """
    state.optimizer.zero_grad()
    seen: list[Finding] = []
    with _watched(state.root.model, seen), torch.compiler.set_stance("force_eager"):
        sums, _ = forward_backward(state, index, batches)
    if not all(_finite(term.value) for term in sums.losses.values()):
        seen.append(Finding(Stage.LOSS, "the output layer or the loss"))
    for name, gradient in state.gradients().items():
        if not _finite(local(gradient)):
            seen.append(Finding(Stage.REDUCED, f"the gradient of {name}"))
    state.optimizer.zero_grad()
    return min(seen, key=lambda finding: finding.stage, default=None)


@contextmanager
def _watched(model: nn.Module, seen: list[Finding]) -> Iterator[None]:
    """Append to ``seen`` each module output, and each gradient of one, that is not finite, as they come."""

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: object, output: object) -> None:
            for tensor in _tensors(output):
                if not _finite(tensor):
                    seen.append(Finding(Stage.OUTPUT, f"the output of {name}{_weights(module)}"))
                elif tensor.requires_grad:
                    tensor.register_hook(lambda gradient: note(gradient, name))

        return look

    def note(gradient: torch.Tensor, name: str) -> None:
        if not _finite(gradient):
            seen.append(Finding(Stage.GRADIENT, f"the gradient at the output of {name}"))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(watch(name)))
        yield


def _weights(module: nn.Module) -> str:
    bad = [name for name, p in module.named_parameters(recurse=False) if not _finite(local(p))]
    return f" (its {' and '.join(bad)} not finite)" if bad else ""


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
