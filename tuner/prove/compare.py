"""How far numbers of a layout may be from those of one process, and what was found of each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

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
    difference = found - wanted
    return torch.where(is_rounding, wanted + torch.nn.functional.softshrink(difference, way), found)


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
