"""How far numbers of a layout may be from those of one process, and what was found of each.

What each module gives in the forward of a step and what gradient reaches it says where two layouts part.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import nn

from tuner.model.outputs import outputs_seen
from tuner.runtime.parts import local

Verdict = Literal["equal", "unequal", "refused", "failed"]
LIMITS = {"loss": 1e-5, "grad_norm": 1e-5, "gradients": 1e-5, "weights": 1e-4, "resumed": 1e-5}
"""Largest relative differences: of a step's loss and norm, of each gradient of step 1, of each weight at the end, and
of losses after a resume from the checkpoint of one process."""
EXACT = ("copies", "saved")
"""What is equal to the last bit or is not: copies on several processes, and the bytes that a checkpoint holds."""
GRADIENT_FLOOR = 1e-3
"""A gradient with a smaller share of the norm of all is compared with that share: it may be rounding alone."""
ROUNDING = 1e-6
"""An element of a gradient with a smaller share of the norm of all may be rounding alone: a key's bias changes no
attention. AdamW takes a whole step by it, in either direction."""
WEIGHT_FLOOR = 1e-2
"""The same of weights, of this size each."""


@dataclass(frozen=True)
class LayoutProof:
    """What was found of one layout."""

    layout: str
    processes: int
    verdict: Verdict
    figures: Mapping[str, float] = field(default_factory=dict)
    """The largest relative difference by what is compared; of what is exact, 0 or 1."""
    cause: str | None = None
    """What is unequal first, why it is refused, or how it failed."""

    def as_json(self) -> dict[str, Any]:
        """The proof as a document has it."""
        figures = {name: value if math.isfinite(value) else None for name, value in self.figures.items()}
        return {
            "layout": self.layout, "processes": self.processes, "verdict": self.verdict, **figures, "cause": self.cause
        }  # fmt: skip


def unequal(figures: Mapping[str, float]) -> list[str]:
    """What is further apart than it may be, in the order of the table; not a number is."""
    limits = LIMITS | dict.fromkeys(EXACT, 0.0)
    return [name for name, value in figures.items() if not value <= limits[name]]


def apart(found: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    """The norm of a difference over that of what is wanted, which counts as at least ``floor``."""
    difference, size = float((found.double() - wanted.double()).norm()), float(wanted.double().norm())
    if difference == 0.0:
        return 0.0
    return difference / max(size, floor, 1e-30) if math.isfinite(difference) else math.inf


def without_rounding(
    found: torch.Tensor, wanted: torch.Tensor, gradient: torch.Tensor, norm: float, way: float
) -> torch.Tensor:
    """Weights ``found``, brought nearer to those ``wanted`` by up to ``way`` where rounding alone has moved both: where
    the ``gradient`` of one process is next to nothing against the ``norm`` of all."""
    is_rounding = (gradient != 0) & (gradient.abs() <= ROUNDING * norm)
    return torch.where(is_rounding, wanted + torch.nn.functional.softshrink(found - wanted, way), found)


def furthest(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference between numbers of steps; infinite where one is not finite."""
    pairs = zip(found, wanted, strict=True)
    return max((abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) else math.inf for a, b in pairs), default=0.0)


def first_step(what: str, found: list[float], wanted: list[float], limit: float) -> str:
    """The first step, from 1, of which a number is further off than it may be, in words; nothing where none is."""
    for step, (one, other) in enumerate(zip(found, wanted, strict=True), 1):
        if not furthest([one], [other]) <= limit:
            return f"{what} of step {step}: {one:.7g}, {other:.7g} in one process, {one / other:.4g} times it"
    return ""


def times(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """`, 2.00 times it` where a tensor is a multiple of what is wanted; else nothing."""
    one, other = found.double().flatten(), wanted.double().flatten()
    square = float(other @ other)
    if square == 0.0 or not bool(one.isfinite().all()):
        return ""
    factor = float(one @ other) / square
    return f", {factor:.4g} times it" if apart(one, factor * other) < LIMITS["gradients"] else ""


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
                off for found, some in zip(noted[name], micro, strict=True)
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
    differing = (dim for dim in range(rows[0].ndim) if len({row.shape[dim] for row in rows}) > 1)
    along = next(differing, max(rows[0].ndim - 2, 0))
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
