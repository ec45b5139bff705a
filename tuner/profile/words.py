"""What is said of memory: the one name of every part, and sizes side by side in one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuner.profile.prediction import PARTS, Part

NAMES: Mapping[Part, str] = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "gathered": "gathered weights",
    "reduced": "reduced gradients",
    "activations": "activations",
    "loss": "loss",
    "batch": "batch",
    "evaluation": "evaluation",
    "staging": "checkpoint copy",
    "constants": "process",
    "rounding": "allocator rounding",
    "other": "temporaries",
}
"""What people read for each part, in a terminal and on a page, predicted and measured.

All but ``constants`` are tensors, or room for them; those are what the process itself takes: Python with torch on a
CPU, the context and communicators on a CUDA device.
"""
TENSORS: tuple[Part, ...] = tuple(part for part in PARTS if part != "constants")
SMALL = 0.005
"""Parts below this share of the whole are left out of a sentence."""


@dataclass(frozen=True)
class Unit:
    """A unit of memory: its bytes, its name and the digits that its numbers have after the point."""

    bytes: int
    name: str
    digits: int

    def of(self, size: int) -> str:
        """A size in this unit: `0.25 GiB`, `257.0 MiB` or `340 bytes`."""
        return f"{self.number(size)} {self.name}"

    def number(self, size: int) -> str:
        """The same without the unit's name."""
        return f"{size / self.bytes:,.{self.digits}f}"


GIB, MIB, KIB, BYTE = Unit(1 << 30, "GiB", 2), Unit(1 << 20, "MiB", 1), Unit(1 << 10, "KiB", 1), Unit(1, "bytes", 0)


def unit_of(most: int) -> Unit:
    """The unit in which sizes up to ``most`` are shown side by side."""
    return next((unit for unit in (GIB, MIB, KIB) if most >= unit.bytes // 2), BYTE)


def largest_first(parts: Mapping[Part, int], of: Iterable[Part] = PARTS) -> str:
    """Those parts that count for something, each with its size, all in one unit."""
    sizes = {part: parts.get(part, 0) for part in of}
    whole = sum(sizes.values())
    unit = unit_of(whole)
    shown = sorted((part for part in sizes if sizes[part] > SMALL * whole), key=lambda part: -sizes[part])
    return ", ".join(f"{NAMES[part]} {unit.of(sizes[part])}" for part in shown)
