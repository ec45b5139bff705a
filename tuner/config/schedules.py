"""The schedule section of the recipe: one class for each kind."""

from __future__ import annotations

from typing import Annotated, Literal

from tuner.config.duration import Duration
from tuner.config.leaves import Choice, Real
from tuner.config.section import Durations, Options, Section, Use
from tuner.config.spans import Cadence, Span

Warmup = Annotated[Duration | None, Span(units=("steps", "tokens", "%"), aliases=(("never", None),))]
Floor = Annotated[float, Real(ge=0, le=1)]
FallShape = Annotated[Literal["linear", "sqrt", "cosine"], Choice(values=("linear", "sqrt", "cosine"))]
FallSpan = Annotated[Duration, Span(units=("steps", "tokens", "%"))]


class ConstantSchedule(Section):
    """A constant learning rate after the warm-up."""

    kind: Annotated[Literal["constant"], Choice(values=("constant",))] = "constant"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: Warmup = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run."""


class LinearSchedule(Section):
    """A learning rate that falls in a straight line."""

    kind: Annotated[Literal["linear"], Choice(values=("linear",))] = "linear"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: Warmup = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run."""
    min_lr_ratio: Floor = 0.0
    """Learning rate at the end, as a share of the peak."""


class CosineSchedule(Section):
    """A learning rate that falls along half a cosine."""

    kind: Annotated[Literal["cosine"], Choice(values=("cosine",))] = "cosine"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: Warmup = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run."""
    min_lr_ratio: Floor = 0.0
    """Learning rate at the end, as a share of the peak."""


class InverseSqrtSchedule(Section):
    """A learning rate that falls as one over the root of the step; it asks for no length of the run."""

    kind: Annotated[Literal["inverse_sqrt"], Choice(values=("inverse_sqrt",))] = "inverse_sqrt"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: FallSpan = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run; it also sets how slowly the fall goes."""


class WsdSchedule(Section):
    """Warm-up, stable, decay: a constant learning rate that falls over the last part of the run."""

    kind: Annotated[Literal["wsd"], Choice(values=("wsd",))] = "wsd"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: Warmup = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run."""
    decay: FallSpan = Duration.parse("10%")
    """Length of the fall at the end, in steps, tokens or percent of the run (wsd_s: of each period)."""
    decay_shape: FallShape = "linear"
    """Shape of the fall: linear, sqrt (1 - sqrt of the progress) or cosine."""
    min_lr_ratio: Floor = 0.0
    """Learning rate at the end, as a share of the peak."""


class WsdPeriodsSchedule(Section):
    """WSD-S: several periods, each of which ends with a fall; the next starts at the peak, without a warm-up."""

    kind: Annotated[Literal["wsd_s"], Choice(values=("wsd_s",))] = "wsd_s"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    warmup: Warmup = Duration.parse("3%")
    """Linear rise from 0, in steps, tokens or percent of the run."""
    periods: Annotated[Durations, Cadence(units=("steps", "tokens", "epochs", "%"), aliases=())]
    """Lengths of the periods, which together cover the run, such as [1000 steps, 1000 steps, 2000 steps]."""
    decay: FallSpan = Duration.parse("10%")
    """Length of the fall at the end of each period, in steps, tokens or percent of it."""
    decay_shape: FallShape = "linear"
    """Shape of the fall: linear, sqrt (1 - sqrt of the progress) or cosine."""
    min_lr_ratio: Floor = 0.0
    """Learning rate at the end of each period, as a share of the peak."""


class CustomSchedule(Section):
    """A schedule of the user's own."""

    kind: Annotated[Literal["custom"], Choice(values=("custom",))] = "custom"
    """Shape of the learning rate after the warm-up, or custom: a function of your own, from the first step on."""
    use: Use
    """FILE.py:NAME or an entry point of the group tuner.schedules: called with the run's steps and `options`."""
    options: Options = {}
    """Keyword arguments of the class or function."""
