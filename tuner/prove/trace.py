"""What each module gives in the forward of a step and what gradient reaches it: the place where two layouts part."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import safetensors.torch
import torch
from torch import nn

from tuner.model.outputs import outputs_seen
from tuner.prove.compare import apart
from tuner.runtime.parts import local

Kind = Literal["output", "gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MODULES_APART = 1e-5
"""Between outputs of a module, relative to their norm; sums in another order are a hundredth of it apart."""
_FLOOR = 1e-3
"""A gradient with a smaller share of the largest one's norm is compared with that share: it may be rounding alone."""


@dataclass
class ModuleTrace:
    """Tensors by module, one for each forward of a step, in the order in which the modules gave them."""

    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Of the loss by those outputs, in the order in which the backward pass reaches them."""

    def of(self, kind: Kind) -> dict[str, list[torch.Tensor]]:
        """The outputs or the gradients."""
        return self.outputs if kind == "output" else self.gradients


@contextmanager
def traced(model: nn.Module) -> Iterator[ModuleTrace]:
    """Note what all modules give in forwards that are trained, and the gradients that reach them.

    What is computed again for a backward pass is left out.
    """
    trace = ModuleTrace()

    def keep(kept: dict[str, list[torch.Tensor]], name: str, tensor: torch.Tensor) -> None:
        kept.setdefault(name, []).append(local(tensor).detach().clone())

    def note(name: str, tensor: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            keep(trace.outputs, name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(keep, trace.gradients, name))

    with outputs_seen((named for named in model.named_modules() if named[0]), note):
        yield trace


def write_trace(trace: ModuleTrace, directory: Path) -> None:
    """Keep a trace, a file for each module: of a step with a micro-batch for each row."""
    directory.mkdir()
    for kind in KINDS:
        noted = trace.of(kind)
        for number, (name, tensors) in enumerate(noted.items()):
            parts = {str(row): tensor.contiguous() for row, tensor in enumerate(tensors)}
            safetensors.torch.save_file(parts, directory / f"{kind}-{number}.safetensors", {"module": name})


@dataclass(frozen=True)
class DifferingModule:
    """A module whose output, or whose output's gradient, is another one than in one process."""

    kind: Kind
    order: int
    """Its place among the modules of one process, in the order of the pass."""
    module: str
    apart: float
    rank: int = 0

    def __str__(self) -> str:
        off = f"{self.apart:.1e} apart on rank {self.rank}"
        if self.kind == "output":
            return f"output of {self.module}: {off}"
        source = ", where the output layer and the loss hand it over" if self.order == 0 else ""
        return f"gradient of the output of {self.module}{source}: {off}"


def first_place(
    trace: ModuleTrace, directory: Path, micro: Sequence[range], share: tuple[int, int], rank: int
) -> DifferingModule | None:
    """Where a process's trace leaves that of one process first, in the order of the passes; None where it does not.

    ``micro`` says which rows each forward had; ``share`` is this process's number among those that cut rows, and how
    many they are. What a module gives in parts of its width is not compared.
    """
    for kind in KINDS:
        noted = trace.of(kind)
        wanted = _read(directory, kind)
        largest = max((_norm(rows.values()) for _, rows in wanted), default=0.0)
        floor = 0.0 if kind == "output" else _FLOOR * largest
        for order, (name, rows) in enumerate(wanted):
            if len(noted.get(name, [])) != len(micro):
                continue
            figures = [
                off
                for found, some in zip(noted[name], micro, strict=True)
                if (off := _apart(found, [rows[row] for row in some], share, floor)) is not None
            ]
            if figures and not max(figures) <= MODULES_APART:
                return DifferingModule(kind, order, name, max(figures), rank)
    return None


def _read(directory: Path, kind: Kind) -> Sequence[tuple[str, Mapping[int, torch.Tensor]]]:
    """Tensors of one process by module and row, in the order of the pass."""
    found = []
    for number in range(len(list(directory.glob(f"{kind}-*.safetensors")))):
        path = directory / f"{kind}-{number}.safetensors"
        with safetensors.safe_open(path, "pt") as file:
            name = file.metadata()["module"]
            found.append((name, {int(key): file.get_tensor(key) for key in file.keys()}))  # noqa: SIM118
    return found


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _apart(found: torch.Tensor, rows: list[torch.Tensor], share: tuple[int, int], floor: float) -> float | None:
    """How far a micro-batch's tensor is from those of its rows, laid end to end; None where it is no such tensor."""
    if any(row.ndim != rows[0].ndim for row in rows):
        return None
    along = next((dim for dim in range(rows[0].ndim) if len({row.shape[dim] for row in rows}) > 1), None)
    if along is None:
        along = max(rows[0].ndim - 2, 0)
    if len({row.shape[:along] + row.shape[along + 1 :] for row in rows}) > 1:
        return None
    wanted = torch.cat(rows, along)
    number, parts = share
    if found.shape != wanted.shape and parts > 1 and found.ndim == wanted.ndim:
        size = -(-wanted.shape[along] // parts)
        first = min(number * size, wanted.shape[along])
        wanted = wanted.narrow(along, first, min(size, wanted.shape[along] - first))
        if found.shape[along] == size:
            found = found.narrow(along, 0, wanted.shape[along])
    return apart(found, wanted, floor) if found.shape == wanted.shape else None
