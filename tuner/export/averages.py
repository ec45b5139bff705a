"""Which weights of a run are exported: those that were trained last, or an average of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tuner.checkpoint.manifest import step_dirs, step_name
from tuner.errors import DataError, RecipeError

if TYPE_CHECKING:
    from tuner.checkpoint.open import CheckpointInfo

_MEAN = re.compile(r"mean:(\d{1,6})")


@dataclass(frozen=True)
class Weights:
    """The trained weights, their exponential average (``ema``), or the mean of the last ``count`` checkpoints."""

    kind: Literal["trained", "ema", "mean"] = "trained"
    count: int = 1

    @staticmethod
    def parse(text: str) -> Weights:
        """Read `trained`, `ema` or `mean:N`. Raises RecipeError."""
        if text in ("trained", "ema"):
            return Weights("ema" if text == "ema" else "trained")
        match = _MEAN.fullmatch(text)
        if match is None or int(match[1]) < 2:
            raise RecipeError(f"--weights {text}: not one of trained, ema, mean:N", hint="write ema, or mean:5")
        return Weights("mean", int(match[1]))

    @property
    def suffix(self) -> str:
        """Its part of the name of an export's directory; empty for the trained weights."""
        return {"trained": "", "ema": "ema", "mean": f"mean-{self.count}"}[self.kind]


TRAINED = Weights()


def averaged_over(last: CheckpointInfo, weights: Weights) -> tuple[CheckpointInfo, ...]:
    """The checkpoints whose mean is meant, the newest first: ``last`` and those of the same run before it.

    ``last`` alone unless a mean is asked for. Raises DataError where there are too few, or one is damaged.
    """
    from tuner.checkpoint.open import open_checkpoint

    if weights.kind != "mean":
        return (last,)
    before = [(step, path) for step, path in step_dirs(last.path.parent) if step < last.step]
    if len(before) < weights.count - 1:
        there = ", ".join(step_name(step) for step in (last.step, *(step for step, _ in before)))
        every = last.step // weights.count
        hints = (
            f"write --weights mean:{len(before) + 1}" if before else "",
            f"train with checkpoint.every: {every} steps and checkpoint.keep: {weights.count}" if every else "",
        )
        raise DataError(
            f"{last.path.parent}: the mean of {weights.count} checkpoints up to {step_name(last.step)} needs more than "
            f"the {len(before) + 1} that are there: {there}",
            hint=", or ".join(filter(None, hints)) or None,
        )
    return (last, *(open_checkpoint(path, shards=False) for _, path in before[: weights.count - 1]))


def in_words(weights: Weights, steps: Sequence[int]) -> str:
    """What an export says of its weights, by the steps of their checkpoints."""
    if weights.kind == "ema":
        return "exponential moving average"
    return f"mean of the checkpoints of steps {', '.join(map(str, sorted(steps)))}"


def path_of(directory: Path, weights: Weights) -> Path:
    """Where an export of these weights goes, next to that of the trained ones in ``directory``."""
    return directory.with_name("-".join(filter(None, (directory.name, weights.suffix))))
