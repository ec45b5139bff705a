"""What a step of AdamW works on: a process's part of one parameter, and the numbers of the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tuner.train.moment_codes import CodeMap

DIVISOR, DECAY, BETA1, REST1, BETA2, REST2, RATE, ROOT, EPSILON = range(9)
"""Where the numbers of a step are: what gradients are divided by; what is left of a weight; the shares of a moment and
of what is new in it; the learning rate over the first correction of the bias, the root of the second; what is added."""


@dataclass(frozen=True)
class Moment:
    """A running average ``[rows, width]``: float32 numbers, or codes and their blocks' scales ``[rows, blocks]``."""

    numbers: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True)
class Part:
    """What a step works on: rows of a parameter, or columns of rows, all ``[rows, width]``, changed in place.

    ``first_row`` and ``first_column``, a multiple of 4, are the first of them in the whole parameter, whose rows have
    ``whole_width`` numbers; without it, as many as here. Weights are bf16 and rounded by chance with a ``key``, an
    int64 scalar, and float32 without.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    average: Moment
    square: Moment
    first_row: int = 0
    key: torch.Tensor | None = None
    first_column: int = 0
    whole_width: int | None = None


@dataclass(frozen=True)
class Step:
    """What the parameters of a group share: numbers, float32 ``[9]``, and the maps of first and second moments.

    Where ``bad``, a float32 scalar, is above 0, nothing changes.
    """

    numbers: torch.Tensor
    average_codes: CodeMap
    square_codes: CodeMap
    bad: torch.Tensor | None
