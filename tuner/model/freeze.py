"""Full fine-tuning of a part: parameters that are left as they are."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.select import select


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Take the parameters that a pattern means out of training, in place: no gradient, no optimizer state.

    Tied parameters are one tensor: the name of either freezes it. Raises RecipeError for a pattern that means nothing,
    or when nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in select(patterns, parameters, "model.freeze"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise RecipeError("model.freeze: no parameter is left to train", hint="leave some out of the list")
