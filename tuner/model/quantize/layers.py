"""Which layers of a frozen base are quantised, and how they are put in the place of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.adaptable import is_linear, not_adaptable
from tuner.model.adapter import stacked_weights
from tuner.model.build import head_layer
from tuner.model.flops import n_experts
from tuner.model.freeze import select
from tuner.model.quantize.codes import Kind, recipe_of
from tuner.model.quantize.linear import QuantizedLinear
from tuner.model.transformers_private import keep_as_made, kept_in_float32


@dataclass(frozen=True)
class QuantizeSpec:
    """How a base is quantised: what its codes are, and the modules (names or globs) that are ``kept`` as they are."""

    kind: Kind
    kept: Sequence[str] = ()
    native: bool = False
    """Whether the CPU makes codes by the compiled kernel: the same bits, sooner."""

    def facts(self) -> dict[str, Any]:
        """What says, with the unquantised weights, which codes and scales there are: a checkpoint notes it."""
        return {**recipe_of(self.kind)}


def quantizable(model: PreTrainedModel, kept: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The layers of a model without an adapter that are quantised, by name; it may be on the meta device.

    They are the linear layers that an adapter may adapt. Not among them: the output layer, routers, what the class
    keeps in float32, what is ``kept`` because it is trained, and layers with the weight in another order (`Conv1D`).
    Raises RecipeError for a name in ``kept`` that means nothing, and where no layer is left.
    """
    experts, float32 = n_experts(model.config.get_text_config()), kept_in_float32(model)
    inside = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_linear(module) and not isinstance(module, QuantizedLinear)
        if module is not head_layer(model) and not _is_router(name, module, experts)
        if f"{name}.weight" not in float32
    }
    owning = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    whole = select(kept, owning, "adapter.modules_to_save")
    bad = not_adaptable(model, inside)
    left = {name: layer for name, layer in inside.items() if name not in bad and not _is_among(name, whole)}
    if not left and not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise RecipeError(
            f"model.quantize: a {model.config.model_type} model has no linear layers that can be quantised",
            hint="write model.quantize: none",
        )
    return left


def quantize_(model: PreTrainedModel, spec: QuantizeSpec) -> None:
    """Quantise such layers one after the other, in place; those that are quantised already stay as they are."""
    layers = quantizable(model, spec.kept)
    for name in list(layers):
        put_in_place(model, name, layers.pop(name).weight, spec)


def put_in_place(model: PreTrainedModel, name: str, weight: Any, spec: QuantizeSpec) -> None:
    """Put a layer with this weight ``[out, in]``, quantised, in the place of the linear layer of this name."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    made = QuantizedLinear.of(layer, weight.detach(), spec.kind, f"{name}.weight", spec.native)
    keep_as_made(made)
    model.set_submodule(name, made)


def left_whole(model: nn.Module) -> str | None:
    """A sentence on large weights of layers that stay unquantised; None where there are none."""
    stacked = stacked_weights(model)
    others = [name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    names = [*stacked, *others]
    if not names:
        return None
    return (
        f"model.quantize: {len(names)} weights stay as they are, such as {names[0]}: "
        "only linear layers are quantised, no experts that lie in one tensor"
    )


def _is_among(name: str, modules: Sequence[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in modules)


def _is_router(name: str, layer: nn.Linear, experts: int) -> bool:
    """Whether a layer chooses or weighs experts: one number for each of them, or for one that is shared."""
    return layer.out_features in {1, experts} or "router" in name.rpartition(".")[2]


def quantized_layers(model: nn.Module) -> Mapping[str, QuantizedLinear]:
    """The quantised layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
