"""The loss of a recipe's method."""

from collections.abc import Mapping
from pathlib import Path

from tuner.config.recipe import CustomMethod, PretrainMethod, SftMethod
from tuner.errors import PluginError
from tuner.model.liger_loss import loss_into_gradient
from tuner.model.linear_cross_entropy import Kernel, softmax_into_gradient
from tuner.model.logit_shape import LogitShape
from tuner.model.native.cross_entropy import native_into_gradient
from tuner.model.objective import CrossEntropy, CustomObjective, Objective
from tuner.runtime.plugins import Plugin, failure, load, require_call, source_file
from tuner.train.figures import CLOCKED

TAKEN = ("step", "epoch", "tokens", "loss", "lr", "grad_norm", "skipped", "kind", *CLOCKED)
"""Keys of a line of metrics.jsonl that a figure cannot have."""


def check_method(method: SftMethod | PretrainMethod | CustomMethod) -> None:
    """Load a loss of the user's own and check its signature. Raises PluginError; nothing is called."""
    if isinstance(method, CustomMethod):
        _factory(method)


def check_logits(method: SftMethod | PretrainMethod | CustomMethod, shape: LogitShape) -> None:
    """Raise PluginError for a loss of the user's own on a model that caps its logits, of which it could not know."""
    if isinstance(method, CustomMethod) and shape.cap is not None:
        raise PluginError(
            f"method.use {method.use}: this model caps its logits, of which a loss of your own is not told",
            hint="take another model, or method.kind: sft or pretrain",
        )


KERNELS: Mapping[str, Kernel] = {
    "liger": loss_into_gradient,
    "native": native_into_gradient,
    "torch": softmax_into_gradient,
}
"""What turns logits into loss and gradient, by the recipe's `model.kernels`."""


def build_objective(method: SftMethod | PretrainMethod | CustomMethod, kernels: str) -> Objective:
    """Cross-entropy by the kernels named, or the user's own loss.

    For the latter ``use`` is called with the options and gives the loss function.
    Raises PluginError where it is not there or fails.
    """
    if not isinstance(method, CustomMethod):
        return CrossEntropy(KERNELS[kernels])
    factory = _factory(method)
    try:
        function = factory(**method.options)
    except Exception as error:
        raise failure(f"method.use {method.use}", error, source_file(factory)) from error
    if not callable(function):
        raise PluginError(f"method.use {method.use} gave a {type(function).__name__}, not a loss function")
    return CustomObjective(function, method.use, TAKEN)


def _factory(method: CustomMethod) -> Plugin:
    factory = load(method.use, "tuner.methods", Path.cwd())  # a path in a loaded recipe is absolute
    require_call(factory, method.use, (), method.options)
    return factory
