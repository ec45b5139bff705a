"""Estimates of the steps of a recipe's variants, for which nothing is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.config.optimizers import AdamwOptimizer
from tuner.config.recipe import Recipe
from tuner.errors import TunerError
from tuner.model.flops import training_flops
from tuner.profile.estimate import Place, computing, seconds_of
from tuner.profile.exchange import least_exchanged
from tuner.profile.layers import layers_alike
from tuner.profile.predict import Target, resolved_for
from tuner.profile.search import Choice
from tuner.profile.sizes import Sizes
from tuner.profile.workload import workload
from tuner.setup.axes import check_axes, possible_sizes
from tuner.setup.settled import MICRO, changed, rows_at_once
from tuner.setup.specs import mesh_of, meta_model_of, trainable_of, weight_parts

PAYS = 0.95
"""What the estimated time of a step must come down to for the memory, or the arithmetic, that it costs."""
BYTES = {"fp32": 4, "bf16": 2}


class Speed:
    """Seconds of a step by the values that a recipe is given, and the least that its state takes."""

    def __init__(self, recipe: Recipe, target: Target, prepared: Path | None = None) -> None:
        self._target = target
        self._resolved, _ = resolved_for(recipe, target)
        self._place = Place(
            target.device, target.rank_info, workload(recipe, self._resolved, target.rank_info, prepared)
        )
        model = meta_model_of(self._resolved)
        self.layers = layers_alike(model)
        """Decoder layers, where all are alike; else 0."""
        trainable_of(self._resolved.recipe, self._resolved.new_ids).apply(model, recipe.seed)
        self._model, self._flops, self._sizes = model, training_flops(model), Sizes.of(model)

    def busy_s(self, values: Mapping[str, Any]) -> float:
        """Seconds of a step with these values, without what is sent between processes."""
        recipe = changed(self._resolved.recipe, values)
        return computing(recipe, self._flops, self._sizes, self._place).seconds

    def step_s(self, values: Mapping[str, Any]) -> float:
        """The least seconds of a step with these values: without the traffic of weights."""
        recipe = changed(self._resolved.recipe, values)
        exchanged = least_exchanged(recipe, self._resolved.config, self._place)
        return seconds_of(self.busy_s(values), exchanged)

    def has_room_for_groups(self, values: Mapping[str, Any]) -> bool:
        """Whether the model and the processes divide into the groups of these values."""
        recipe = changed(self._resolved.recipe, values)
        try:
            check_axes(self._model, recipe.parallel)
            mesh_of(recipe, self._target.rank_info)
        except TunerError:
            return False
        return True

    def group_sizes(self, axis: str) -> tuple[int, ...]:
        """The sizes of an axis that the model can have inside a machine."""
        local = self._target.rank_info.local_world_size
        return tuple(size for size in possible_sizes(axis, self._resolved.config) if local % size == 0)

    def worth(self, values: Mapping[str, Any], sizes: Sequence[int], best: Choice | None) -> list[int]:
        """Rows that are worth their memory, and with such values the arithmetic of recomputing next to the best so far.

        Each is held against half of it, or against the next smaller one where that is less; after the first that does
        not pay, none does.
        """
        paying, before = [*sizes[:1]], sizes[0]
        for size in sizes[1:]:
            if self.step_s({**values, MICRO: size}) > PAYS * self.step_s({**values, MICRO: min(size / 2, before)}):
                break
            paying.append(size)
            before = size
        at_most = float("inf") if best is None else PAYS * self.step_s(best.overrides)
        return [size for size in paying if self.step_s({**values, MICRO: size}) <= at_most]

    def state_bytes(self, values: Mapping[str, Any]) -> float:
        """The least that the weights and their moments take of each process's device with these values."""
        recipe = changed(self._resolved.recipe, values)
        return self._resolved.n_parameters * _least_each(recipe) / weight_parts(recipe, self._target.rank_info)

    def rows(self, settled: Recipe) -> str:
        """The rows of a micro-batch in words."""
        rows, length = rows_at_once(settled), int(self._resolved.recipe.data.max_length)
        if not settled.data.packs_rows:
            return "documents that are not packed stay alone"
        return f"{rows} row{'' if rows == 1 else 's'} of {length:,} tokens at a time"


def _least_each(recipe: Recipe) -> float:
    """Bytes of a device that each parameter takes at least: its weight, and its moments."""
    if recipe.adapter.kind != "none" or recipe.model.freeze:
        return {"none": 2.0, "int8": 1.0, "nf4": 0.5}[recipe.model.quantize]
    weight = BYTES[str(recipe.model.dtype)]
    optimizer = recipe.optimizer
    if not isinstance(optimizer, AdamwOptimizer) or optimizer.offload == "host":
        return weight
    if optimizer.state == "8bit":
        return weight + 2.0
    return weight + (8.0 if optimizer.rounding == "stochastic" else 2.0 * weight)  # nearest: as the weights are
