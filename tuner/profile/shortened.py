"""A prediction of a model whose layers are alike, from two of fewer layers: every byte grows evenly with their number.

Where the fewer layers are enough for what comes at the start and at the end of a pass, each further one adds the same.
It is for choosing; what is chosen is predicted whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tuner.config.recipe import Recipe
from tuner.profile.estimate import seconds_of
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import MemoryTimeline, Moment, Part, Phase, Prediction
from tuner.profile.traffic import Traffic

FEWER, MORE = 4, 5
"""Layers of the two models that are traced."""
FIRST, LAST = 2, 2
"""Layers at the start and at the end of a pass in which it may differ from all others."""
MomentKey = tuple[int, Phase, str, str]


def predict_by_layers(recipe: Recipe, target: Target, layers: int, prepared: Path | None = None) -> Prediction:
    """What `predict` says of a model whose ``layers`` are alike, from two shorter traces.

    Where these do not go through the same moments, or the model has few layers, it is predicted whole. Raises as
    `predict`.
    """
    if layers <= FEWER + MORE or str(recipe.train.gradient_checkpointing_layers) != "100%":
        return predict(recipe, target, prepared)
    few, more = (predict(recipe, target, prepared, layers=count) for count in (FEWER, MORE))
    pairs = _aligned(few.memory, more.memory)
    if pairs is None:
        return predict(recipe, target, prepared)
    moments = tuple(replace(one, parts=_parts(one.parts, other.parts, layers)) for one, other in pairs)
    memory = MemoryTimeline(moments, {}, _grown(few.memory.host, more.memory.host, layers))
    flops = {name: _line(value, more.time.flops[name], layers) for name, value in few.time.flops.items()}
    traffic = _traffic(few.time.traffic, more.time.traffic, layers)
    busy_s = _line(few.time.busy_s, more.time.busy_s, layers)
    time = replace(more.time, flops=flops, traffic=traffic, busy_s=busy_s, step_s=seconds_of(busy_s, traffic))
    return replace(more, memory=memory, time=time)


def _line(few: float, more: float, layers: int) -> float:
    """The value at so many layers of what grows evenly."""
    return more + (more - few) / (MORE - FEWER) * (layers - MORE)


def _parts(few: Mapping[Part, int], more: Mapping[Part, int], layers: int) -> dict[Part, int]:
    """The bytes of a moment; what the allocator rounds comes from how blocks fall, and grows as the root of the rest.

    A line through two such figures would multiply their chance difference by the number of layers.
    """
    asked = _grown(few, {part: size for part, size in more.items() if part != "rounding"}, layers)
    growth = sum(asked.values()) / max(1, sum(more.values()) - more["rounding"])
    return {**asked, "rounding": round((few["rounding"] + more["rounding"]) / 2 * growth**0.5)}


def _grown(few: Mapping[Part, int], more: Mapping[Part, int], layers: int) -> dict[Part, int]:
    return {part: max(0, round(_line(few.get(part, 0), size, layers))) for part, size in more.items()}


def _traffic(few: Traffic, more: Traffic, layers: int) -> Traffic:
    return Traffic(**{name: round(_line(value, vars(more)[name], layers)) for name, value in vars(few).items()})


def _aligned(few: MemoryTimeline, more: MemoryTimeline) -> list[tuple[Moment, Moment]] | None:
    """The same moments of both; None where one goes through others."""
    ones, others = _keyed(few, FEWER), _keyed(more, MORE)
    if {key: len(moments) for key, moments in ones.items()} != {key: len(moments) for key, moments in others.items()}:
        return None
    return [pair for key, moments in ones.items() for pair in zip(moments, others[key], strict=True)]


def _keyed(timeline: MemoryTimeline, layers: int) -> dict[MomentKey, list[Moment]]:
    """The moments by their pass, phase, place, and the place of the layer before; without those of layers between."""
    names = [name for name in timeline.layers if name]
    places = {name: _place(number, layers) for number, name in enumerate(names)}
    found: dict[MomentKey, list[Moment]] = {}
    number, phase, after = 0, None, ""
    for moment in timeline.moments:
        if moment.phase != phase:
            number, phase, after = number + 1, moment.phase, ""
        place = places.get(moment.module, moment.module)
        if moment.module in places:
            after = place or "between"
        if place is not None and after != "between":
            found.setdefault((number, moment.phase, place, after), []).append(moment)
    return found


def _place(number: int, layers: int) -> str | None:
    """Where a layer lies: counted from the start or from the end; None between."""
    if number < FIRST:
        return f"layer {number}"
    return f"layer -{layers - number}" if number >= layers - LAST else None
