"""The schedule section of the recipe: one class for each kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tuner.config.numbers import CadenceSpan, Duration, Real, Span
from tuner.config.section import ByKind, Durations, Options, Section, Use
from tuner.config.value_types import NEVER, Several, T, Word, refuse

_SCHEDULE_KIND = (
    "Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."
)
ScheduleKind = Annotated[Word[T], Field(description=_SCHEDULE_KIND)]
_WARMUP = "Linear warm-up from 0, in steps, tokens or percent of the run."
Warmup = Annotated[Duration | None, Span(units=("steps", "tokens", "%"), aliases=NEVER), Field(description=_WARMUP)]
MinLrRatio = Annotated[float, Real(ge=0, le=1), Field(description="Learning rate at the end, as a share of the peak.")]
_DECAY_SHAPE = "Shape of the decay: linear, sqrt (1 - sqrt of the progress) or cosine."
DecayShape = Annotated[Word[Literal["linear", "sqrt", "cosine"]], Field(description=_DECAY_SHAPE)]
PartOfRun = Annotated[Duration, Span(units=("steps", "tokens", "%"))]


class ConstantSchedule(Section):
    """A constant learning rate after the warm-up."""

    kind: ScheduleKind[Literal["constant"]] = "constant"
    warmup: Warmup = Duration.parse("3%")


class LinearSchedule(Section):
    """A learning rate that decays linearly."""

    kind: ScheduleKind[Literal["linear"]] = "linear"
    warmup: Warmup = Duration.parse("3%")
    min_lr_ratio: MinLrRatio = 0.0


class CosineSchedule(Section):
    """A learning rate that decays along half a cosine."""

    kind: ScheduleKind[Literal["cosine"]] = "cosine"
    warmup: Warmup = Duration.parse("3%")
    min_lr_ratio: MinLrRatio = 0.0


class InverseSqrtSchedule(Section):
    """A learning rate that decays as one over the root of the step; it needs no length of the run."""

    kind: ScheduleKind[Literal["inverse_sqrt"]] = "inverse_sqrt"
    warmup: PartOfRun = Duration.parse("3%")
    """Linear warm-up from 0, in steps, tokens or percent of the run; it also sets how slowly the rate decays."""


class WsdSchedule(Section):
    """Warm-up, stable, decay: a constant learning rate that decays over the last part of the run."""

    kind: ScheduleKind[Literal["wsd"]] = "wsd"
    warmup: Warmup = Duration.parse("3%")
    decay: PartOfRun = Duration.parse("10%")
    """Length of the decay at the end, in steps, tokens or percent of the run (wsd_s: of each period)."""
    decay_shape: DecayShape = "linear"
    min_lr_ratio: MinLrRatio = 0.0


class WsdPeriodsSchedule(Section):
    """WSD-S: several periods, each of which ends with a decay; the next starts at the peak, without a warm-up."""

    kind: ScheduleKind[Literal["wsd_s"]] = "wsd_s"
    warmup: Warmup = Duration.parse("3%")
    periods: Annotated[Durations, CadenceSpan(units=("steps", "tokens", "epochs", "%"), aliases=())]
    """Lengths of the periods, which together cover the run, such as [1000 steps, 1000 steps, 2000 steps]."""
    peaks: Annotated[tuple[float, ...], Several(item=Real(gt=0, le=1), empty=True)] = ()
    """Learning rate of each period before its decay, as a share of the peak, such as [1, 0.7, 0.5]; empty: all 1."""
    decay: PartOfRun = Duration.parse("10%")
    """Length of the decay at the end of each period, in steps, tokens or percent of it."""
    decay_shape: DecayShape = "linear"
    min_lr_ratio: Annotated[float, Real(ge=0, le=1)] = 0.0
    """Learning rate at the end of each period, as a share of what it was before the decay."""

    @model_validator(mode="after")
    def _a_peak_for_each(self) -> WsdPeriodsSchedule:
        if self.peaks and len(self.peaks) != len(self.periods):
            raise refuse(f"got {len(self.peaks)} peaks for {len(self.periods)} periods: each has its own, or none has")
        return self


class CustomSchedule(Section):
    """A custom schedule."""

    kind: ScheduleKind[Literal["custom"]] = "custom"
    use: Use
    """FILE.py:NAME or an entry point of the group tuner.schedules: called with the run's steps and `options`."""
    options: Options = {}
    """Keyword arguments of the class or function."""


Schedule = Annotated[
    CosineSchedule | LinearSchedule | ConstantSchedule | InverseSqrtSchedule | WsdSchedule | WsdPeriodsSchedule
    | CustomSchedule,
    ByKind(),
]
"""One of them, by its `kind`."""
