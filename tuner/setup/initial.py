"""What `model.init_from` gives a recipe's model: planned on a model without storage, and given when it is built."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from tuner.config.methods import head_of
from tuner.config.recipe import InitFrom, Recipe
from tuner.init_from.give import Giver, report, summary
from tuner.init_from.match import KEY, MOST, InitPlan, matched, plan_of
from tuner.init_from.sources import pinned, versions_in
from tuner.init_from.target import InitTarget, target_of
from tuner.model.build import meta_model, model_config
from tuner.model.quantize.layers import quantizable
from tuner.model.trainable import TrainableSpec
from tuner.setup.findings import Findings
from tuner.setup.resolve import Resolved, model_spec, quantize_of
from tuner.setup.specs import assembly_spec


def planned(recipe: Recipe, config: PretrainedConfig, trainable: TrainableSpec) -> InitPlan:
    """What the entries give a model of this config, by headers.

    Raises RecipeError with all that is unclear, DataError for damaged files.
    """
    return plan_of(dict(enumerate(recipe.model.init_from)), _target(recipe, config, trainable))


def newer(resolved: Resolved, entries: Mapping[int, InitFrom]) -> InitPlan:
    """The same of entries by number, for the model of a resolved recipe."""
    return plan_of(entries, _target(resolved.recipe, resolved.config, assembly_spec(resolved).trainable))


def check_initial(recipe: Recipe, trainable: TrainableSpec, found: Findings) -> None:
    """Note all that is unclear about the entries, by the headers of their files: before any device is used.

    Raises DataError for damaged files.
    """
    config = model_config(model_spec(recipe, trainable.new_ids))
    problems = matched(dict(enumerate(recipe.model.init_from)), _target(recipe, config, trainable), hashes=False)[1]
    for problem in problems[:MOST]:
        found.add(problem.key, problem.message, problem.hint)
    if len(problems) > MOST:
        found.add(KEY, f"{len(problems) - MOST} more problems of this kind")


def _target(recipe: Recipe, config: PretrainedConfig, trainable: TrainableSpec) -> InitTarget:
    head = head_of(recipe.method)
    plain, adapted = (meta_model(config, torch.float32, head) for _ in range(2))
    coded = frozenset[str]()
    if (quantize := quantize_of(recipe)) is not None:
        coded = frozenset(f"{name}.weight" for name in quantizable(plain, quantize.kept))
    trainable.apply(adapted, recipe.seed)
    return target_of(plain, adapted, trainable, coded)


class Initial:
    """Gives a model that is being built what its recipe says (by its ``giver``), and notes what that was."""

    def __init__(self, resolved: Resolved, trainable: TrainableSpec) -> None:
        """Plan it; nothing is read. On resuming, what the run was given then counts: see :class:`Resolved`."""
        self._before = resolved.given
        versions = resolved.versions if self._before is None else versions_in(self._before)
        target = _target(resolved.recipe, resolved.config, trainable)
        plan = plan_of(pinned(resolved.recipe.model.init_from, versions), target, hashes=True)
        self.giver = Giver(plan, trainable.new_ids, frozen_only=self._before is not None)

    def noted(self) -> dict[str, Any]:
        """What checkpoints note, and the report of a run that begins."""
        if self._before is not None:
            return dict(self._before)
        facts = self.giver.facts()
        return {**facts, "summary": summary(self.giver.plan), "report": report(self.giver.plan, facts)}
