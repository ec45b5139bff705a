"""`tuner prove --weights`: the model of a recipe, with the values of its weights, against its class."""

import torch

from tuner.config.recipe import Recipe
from tuner.data.building.spec import prepare_spec
from tuner.model.probe import IsolationReport, require_isolation
from tuner.parallel.mesh import Mesh
from tuner.runtime.dist import RankInfo
from tuner.setup.model import assembled
from tuner.setup.resolve import resolve, takes_several
from tuner.setup.settled import without_prediction
from tuner.setup.specs import assembly_spec


def prove_weights(recipe: Recipe) -> tuple[IsolationReport, str]:
    """How far documents of a row move each other, and are from the model as transformers loads it; and their route.

    The whole model, in float32 on the CPU, a module at a time; what a launch finds in the cache is not asked. Raises
    RecipeError where the model cannot be trained.
    """
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    here = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": "cpu"})})
    resolved = resolve(without_prediction(here), spec.max_length, RankInfo(), spec.tokenizer.new_ids)
    root = assembled(resolved, assembly_spec(resolved).for_values(), mesh=Mesh(), device=torch.device("cpu")).root
    vocab_size, longest = resolved.config.get_text_config().vocab_size, int(resolved.recipe.data.max_length)
    return require_isolation(root, vocab_size, takes_several(recipe), longest, every_layer=True), root.route
