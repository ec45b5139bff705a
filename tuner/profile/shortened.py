"""A prediction of a model whose layers are alike, from two of fewer layers: every byte grows evenly with their number.

Where the fewer layers are enough for what comes at the start and at the end of a pass, each further one adds the same:
what is asked of the allocator is then that of the whole model to the byte. How much more it holds is not known from
fewer layers, only about. It is for choosing; what is chosen is predicted whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.config.recipe import Recipe
from tuner.model.offload import IN_FLIGHT
from tuner.profile.estimate import seconds_of
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import MemoryTimeline, Moment, Part, Phase, Prediction
from tuner.profile.traffic import Traffic

MomentKey = tuple[int, Phase, str, str]


@dataclass(frozen=True)
class Ends:
    """Layers at the start of a pass, and as many at its end, in which it may differ from all others."""

    layers: int

    @property
    def fewer(self) -> int:
        """Layers of the smaller of the two models that are traced: those of the ends alone."""
        return 2 * self.layers

    @property
    def more(self) -> int:
        """Layers of the larger one."""
        return self.fewer + 1

    @classmethod
    def of(cls, recipe: Recipe) -> Ends:
        """Those of a recipe: weights are gathered for the next layer, inputs leave for the host over the next few."""
        return cls(1 + (IN_FLIGHT if recipe.train.offload_activations is True else 1))

    def place(self, number: int, count: int) -> str | None:
        """Where one of so many layers lies: counted from the start or from the end; None between."""
        if number < self.layers:
            return f"layer {number}"
        return f"layer -{count - number}" if number >= count - self.layers else None


def predict_by_layers(recipe: Recipe, target: Target, layers: int, prepared: Path | None = None) -> Prediction:
    """What `predict` says of a model whose ``layers`` are alike, from two shorter traces.

    Where these do not go through the same moments, or the model has few layers, it is predicted whole. Raises as
    `predict`.
    """
    ends = Ends.of(recipe)
    if layers <= ends.fewer + ends.more or str(recipe.train.gradient_checkpointing_layers) != "100%":
        return predict(recipe, target, prepared)
    few, more = (predict(recipe, target, prepared, layers=count) for count in (ends.fewer, ends.more))
    pairs = _aligned(few.memory, more.memory, ends)
    if pairs is None:
        return predict(recipe, target, prepared)
    further = layers - ends.more
    moments = tuple(replace(one, parts=_parts(one.parts, other.parts, further)) for one, other in pairs)
    memory = MemoryTimeline(moments, {}, _grown(few.memory.host, more.memory.host, further))
    flops = {name: _line(value, more.time.flops[name], further) for name, value in few.time.flops.items()}
    traffic = _traffic(few.time.traffic, more.time.traffic, further)
    busy_s = _line(few.time.busy_s, more.time.busy_s, further)
    time = replace(more.time, flops=flops, traffic=traffic, busy_s=busy_s, step_s=seconds_of(busy_s, traffic))
    return replace(more, memory=memory, time=time)


def _line(few: float, more: float, further: int) -> float:
    """The value with so many layers more than the larger model, of what grows evenly."""
    return more + (more - few) * further


def _parts(few: Mapping[Part, int], more: Mapping[Part, int], further: int) -> dict[Part, int]:
    """The bytes of a moment; what the allocator rounds comes from how blocks fall, and grows as the root of the rest.

    A line through two such figures would multiply their chance difference by the number of layers.
    """
    asked = _grown(few, {part: size for part, size in more.items() if part != "rounding"}, further)
    growth = sum(asked.values()) / max(1, sum(more.values()) - more["rounding"])
    return {**asked, "rounding": round((few["rounding"] + more["rounding"]) / 2 * growth**0.5)}


def _grown(few: Mapping[Part, int], more: Mapping[Part, int], further: int) -> dict[Part, int]:
    return {part: max(0, round(_line(few.get(part, 0), size, further))) for part, size in more.items()}


def _traffic(few: Traffic, more: Traffic, further: int) -> Traffic:
    return Traffic(**{name: round(_line(value, vars(more)[name], further)) for name, value in vars(few).items()})


def _aligned(few: MemoryTimeline, more: MemoryTimeline, ends: Ends) -> list[tuple[Moment, Moment]] | None:
    """The same moments of both; None where one goes through others."""
    ones, others = _keyed(few, ends), _keyed(more, ends)
    if {key: len(moments) for key, moments in ones.items()} != {key: len(moments) for key, moments in others.items()}:
        return None
    return [pair for key, moments in ones.items() for pair in zip(moments, others[key], strict=True)]


def _keyed(timeline: MemoryTimeline, ends: Ends) -> dict[MomentKey, list[Moment]]:
    """The moments by their pass, phase, place, and the place of the layer before; without those of layers between."""
    names = [name for name in timeline.layers if name]
    places = {name: ends.place(number, len(names)) for number, name in enumerate(names)}
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
