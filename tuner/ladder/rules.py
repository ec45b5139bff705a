"""What follows from a model's parameters by a ladder's rules: batch, rate and warm-up, and the steps of its marks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tuner.config.ladder import LadderSection
from tuner.errors import RecipeError, counted

Phase = Literal["initial", "pre-decay", "post-decay"]


def mark_name(multiple: float, phase: Phase) -> str:
    """A mark in words: `initial`, `0.5 pre-decay`."""
    return phase if phase == "initial" else f"{multiple:g} {phase}"


@dataclass(frozen=True)
class PlannedMark:
    """A step at which a rung is saved and evaluated: before or after the decay of the period that ends there."""

    multiple: float
    phase: Phase
    step: int
    tokens: int
    """Of so many steps of full rows."""


INITIAL = PlannedMark(0.0, "initial", 0, 0)
"""The mark before the first step."""


@dataclass(frozen=True)
class StepPlan:
    """The steps of a rung: its warm-up, the ends of its periods, and where their decays begin."""

    warmup_steps: int
    ends: tuple[int, ...]
    decays: tuple[int, ...]

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.ends[-1]

    @property
    def periods(self) -> tuple[int, ...]:
        """Steps of each period."""
        return tuple(end - start for start, end in pairwise((0, *self.ends)))

    def marks(self, multiples: Sequence[float], batch_tokens: int) -> tuple[PlannedMark, ...]:
        """Before and after each decay, in the order of steps."""
        found: list[PlannedMark] = []
        for multiple, before, end in zip(multiples, self.decays, self.ends, strict=True):
            found.append(PlannedMark(multiple, "pre-decay", before, before * batch_tokens))
            found.append(PlannedMark(multiple, "post-decay", end, end * batch_tokens))
        return tuple(found)


def target_batch_tokens(section: LadderSection, parameters: int, of_recipe: int) -> int:
    """Tokens of a step to aim at; `of_recipe` are those of the recipe's own batch."""
    law = section.batch_tokens
    return of_recipe if law == "recipe" else max(1, round(law.of(parameters)))


def peak_lr(section: LadderSection, parameters: int) -> float | None:
    """The peak learning rate; None where it is the recipe's."""
    return None if section.lr == "recipe" else section.lr.of(parameters)


def stepped_peaks(section: LadderSection) -> list[float]:
    """The peak of each period as a share of the first multiple's, where they step down; else none."""
    return [round(max(1.0, multiple) ** -0.5, 6) for multiple in section.multiples] if section.stepped else []


def beta2(section: LadderSection, batch_tokens: int) -> float | None:
    """Adam's second beta for steps of so many tokens; None where it is the recipe's."""
    if section.beta2 == "recipe":
        return None
    return section.beta2 if batch_tokens >= section.small_batch_tokens else section.beta2_small_batch


def step_plan(section: LadderSection, parameters: int, batch_tokens: int) -> StepPlan:
    """The steps of a run with steps of so many tokens: each period ends at the step nearest to its multiple.

    Raises RecipeError where a period would have no step, or none before its decay.
    """
    tokens = section.tokens.of(parameters)
    ends = tuple(round(tokens * multiple / batch_tokens) for multiple in section.multiples)
    share = section.decay.share  # of steps as schedule.kind: wsd_s counts it: a mark lies where the rate begins to fall
    decays = tuple(end - max(1, math.ceil(share * (end - start))) for start, end in pairwise((0, *ends)))
    for multiple, start, before, end in zip(section.multiples, (0, *ends), decays, ends, strict=False):
        if not start < before < end:
            raise RecipeError(
                f"ladder: {counted(parameters, 'parameter')} have no steps for the period that ends at {multiple:g}: "
                f"{round(tokens * multiple):,} tokens are {end:,} steps of {batch_tokens:,}",
                hint="write larger ladder.multiples, or a smaller ladder.batch_tokens",
            )
    return StepPlan(max(1, round(section.warmup_tokens.of(parameters) / batch_tokens)), ends, decays)
