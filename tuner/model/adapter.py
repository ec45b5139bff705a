"""Low-rank adapters: peft's layers placed inside the model, whose own parameters are frozen.

LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685) adds s·B·A to a weight; rsLoRA (Kalajdzievski 2023,
https://arxiv.org/abs/2312.03732) takes s = alpha / sqrt(r) in place of alpha / r; DoRA (Liu et al. 2024,
https://arxiv.org/abs/2402.09353) trains the length of every row of the sum on its own.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model import adaptable
from tuner.model.adapted_products import take_together
from tuner.model.build import has_score, head_layer, is_part
from tuner.model.experts import LORA_A, LORA_B, NO_EXPERTS, adapted_experts
from tuner.model.freeze import means, select
from tuner.model.wrap import Wrapper, wrappers_of
from tuner.runtime.warned import pass_on

ADAPTER = "default"


@dataclass(frozen=True)
class LoraSpec:
    """Rank, scale numerator, dropout share, linear layers to adapt (``all-linear``: all but the output), and variant.

    ``modules_to_save`` are trained in full, in float32, besides the adapter. Both lists hold names or globs (see
    :func:`tuner.model.freeze.select`).
    """

    r: int
    alpha: float
    dropout: float
    target_modules: str | Sequence[str]
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: Sequence[str] = ()
    experts: bool = False
    """Whether the routed experts of each layer are adapted, too (:mod:`tuner.model.adapted_experts`)."""

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def peft_config(self, targets: Sequence[str], scores: bool, base: str | None = None) -> LoraConfig:
        """The same as peft's config for these layers, which ``adapter_config.json`` holds."""
        return LoraConfig(
            r=self.r, lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft multiplies with it; a float works
            lora_dropout=self.dropout, target_modules=list(targets), use_rslora=self.use_rslora, bias="none",
            use_dora=self.use_dora, task_type="SEQ_CLS" if scores else "CAUSAL_LM", base_model_name_or_path=base,
        )


def add_lora(model: PreTrainedModel, spec: LoraSpec, seed: int) -> None:
    """Put float32 adapter layers into the model and freeze all else but ``modules_to_save``, in place.

    ``A`` is drawn from ``seed``, ``B`` is zero and a DoRA length is its row's own, so the model computes what it did.
    On a meta model the new parameters are on meta too. Raises RecipeError for a name that matches nothing, and for
    layers that peft would not adapt.
    """
    on_meta = next(model.parameters()).device.type == "meta"
    saved = saved_modules(model, spec.modules_to_save)
    targets = _target_names(model, spec, saved)
    config = spec.peft_config(_shortest(model, targets), has_score(model))
    config.fan_in_fan_out = any(type(module).__name__ == "Conv1D" for module in model.modules())
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)  # refused right below
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)  # said at the end
            torch.manual_seed(seed)
            _inject(config, model, targets, on_meta)
            if spec.experts:
                from tuner.model.adapted_experts import ExpertsLora, adapt_experts  # few adapters have them

                adapt_experts(model, ExpertsLora(spec.r, spec.scale, spec.dropout), saved)
    except ValueError as error:
        raise RecipeError(f"adapter: {str(error).splitlines()[0]}") from error
    _require_adapted(model, targets)
    if spec.use_dora:
        _refuse_output_layer(model)
    train_besides(model, saved)
    for name, other in ({} if on_meta else tied_layers(model)).items():
        pass_on(
            f"adapter.target_modules: {name} shares its weight with {other}: its adapter cannot be merged, and is "
            "exported with --adapter keep alone"
        )
    for _, layer in lora_layers(model):
        if layer.lora_magnitude_vector:  # peft measures in the type of the frozen weight
            weight = layer.get_base_layer().weight.float()
            length = torch.linalg.vector_norm(weight, dim=0 if layer.fan_in_fan_out else 1)  # of each output's weights
            layer.lora_magnitude_vector[ADAPTER].weight.data = length
            continue
        if isinstance(layer.lora_dropout[ADAPTER], nn.Identity):
            _leave_input(layer)
        if adaptable.takes_product(layer, ADAPTER):
            adaptable.add_in_product(layer)
    take_together(model, ADAPTER)
    model.eval()


def _inject(config: LoraConfig, model: PreTrainedModel, targets: Sequence[str], on_meta: bool) -> None:
    if not (stacked_weights(model) and taken_for_experts(model, targets)):
        inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=on_meta)
        return
    parts: Any = nn.Module()  # without the model's type peft adapts the very layers that its config names
    for name, child in model.named_children():
        parts.add_module(name, child)
    inject_adapter_in_model(config, parts, ADAPTER, low_cpu_mem_usage=on_meta)
    for name, child in parts.named_children():
        setattr(model, name, child)
    model.peft_config = parts.peft_config  # as it notes it on a whole model


def _leave_input(layer: Any) -> None:
    """Have an adapter take its input as it is under autocast, which converts it to the type of the products anyway.

    peft first makes it float32 as the adapter is: autocast's copy of that holds the same numbers as the input and is
    kept with it for the backward pass, in every adapted layer. With dropout, which is drawn on that copy, it stays,
    and so it does in DoRA's own forward.
    """
    convert = layer._cast_input_dtype

    def unless_autocast(source: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        if source is not None and torch.is_autocast_enabled(source.device.type):
            return source
        converted: torch.Tensor | None = convert(source, dtype)
        return converted

    layer._cast_input_dtype = unless_autocast


def _require_adapted(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Check that peft adapted these very layers, whatever it makes of their names. Raises RecipeError."""
    there = {name for name, _ in lora_layers(model)}
    left_out = [name for name in targets if name not in there]
    if left_out:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in targets if name in there}))
        raise RecipeError(
            f"adapter.target_modules: peft cannot adapt {left_out[0]} of a {model.config.model_type} model",
            hint=f"write target_modules: [{names}]" if names else "name other layers, such as the attention's",
        )


def _refuse_output_layer(model: PreTrainedModel) -> None:
    """Refuse DoRA there: a loss takes the layer as one matrix, which DoRA would change with each step. RecipeError."""
    output = model.get_output_embeddings()
    for name, layer in lora_layers(model):
        if layer is output:
            raise RecipeError(
                f"adapter.target_modules: {name} is the output layer, which losses take as one matrix: DoRA cannot "
                "adapt it",
                hint=f"write adapter.kind: lora, or leave {name} out of adapter.target_modules",
            )


def stacked_weights(model: nn.Module) -> list[str]:
    """Names of the parameters in which the weights of all routed experts of a layer lie, one after the other."""
    found = []
    for name, module in model.named_modules():
        if not type(module).__name__.startswith("Conv"):
            own = module.named_parameters(recurse=False)
            stacked = (last for last, one in own if one.ndim == 3 and len(one) > 1)
            found += [f"{name}.{last}" for last in stacked if not last.endswith((LORA_A, LORA_B))]
    return found


def left_out_experts(model: PreTrainedModel) -> str | None:
    """A sentence on the routed experts that an adapter leaves as they are; None for a model that has none.

    Layers of their own, where a class still has them, are adapted as all others.
    """
    adapted = tuple(f"{name}." for name in adapted_experts(model))
    names = (name for name in stacked_weights(model) if not name.startswith(adapted))
    weights = [name for name in names if not model.get_parameter(name).requires_grad]
    if not weights:
        return None
    return (
        f"adapter: the routed experts are not adapted ({len(weights)} tensors such as {weights[0]}, each with the "
        "weights of all experts of a layer); attention, dense layers and shared experts can be"
    )


@contextmanager
def calls(model: nn.Module) -> Iterator[set[str]]:
    """Within, the names of the adapted layers, and of modules of adapted experts, that are called so far."""
    called: set[str] = set()
    with ExitStack() as hooks:
        for name, layer in [*adapter_layers(model), *adapted_experts(model).items()]:
            hooks.enter_context(layer.register_forward_hook(lambda *_, name=name: called.add(name)))
        yield called


def require_used(
    model: PreTrainedModel, logits: Callable[[], torch.Tensor], evaluated: Iterable[str] = (),
    runs: Callable[[str], bool] | None = None,
) -> None:
    """Check that each adapter is part of what the model computes, and of that alone; ``logits`` runs the model.

    Layers that were called in evaluation before are the ``evaluated``. Where it runs a part of the model, ``runs`` says
    whether a module, by its name, is in it.

    A weight that code reads without calling the layer leaves an adapter on it untrained; layers whose weight several
    blocks share get one adapter each, which no merged weight can hold. Code that runs here, in training and in
    evaluation, is looked at by what it computes, and all of it by its source: kernels of CUDA are given weights, too.
    Raises RecipeError with those to leave out.
    """
    layers = dict(adapter_layers(model))
    running = {name: layer for name, layer in layers.items() if runs is None or runs(name)}
    _require_experts_called(model, logits, runs)
    bad = adaptable.not_adaptable(model, {name: layer.get_base_layer() for name, layer in layers.items()})
    for name, why in bad.items():
        raise _not_adaptable(layers, bad, name, why)
    in_both = (True, False) if running.keys() - set(evaluated) else (True,)
    for training in in_both if layers else ():
        model.train(training)
        try:
            with torch.set_grad_enabled(training):
                found = _require_called(model, running, logits)
        finally:
            model.eval()
        if training and not found.requires_grad:
            name = model.config.model_type
            raise RecipeError(
                f"adapter.kind: a {name} model gives an adapter no gradients where its embeddings are not trained",
                hint="train the model in full: adapter.kind: none",
            )


def _require_called(model: nn.Module, layers: Mapping[str, Any], logits: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Check that each layer is called, or that nothing reads its weight; returns the logits. Raises RecipeError."""

    def seeded() -> torch.Tensor:
        with torch.random.fork_rng(devices=()):  # where there is dropout
            torch.manual_seed(0)
            return logits()

    with calls(model) as called:
        before = seeded()
    for name, layer in layers.items():
        if name not in called and _is_read(adaptable.held_tensor(layer.get_base_layer()), before, seeded):
            raise _not_adaptable(layers, (name,), name, adaptable.READ)
    return before


def _require_experts_called(
    model: PreTrainedModel, logits: Callable[[], torch.Tensor], runs: Callable[[str], bool] | None
) -> None:
    """Check that the modules of adapted experts are called. Raises RecipeError."""
    names = [name for name in adapted_experts(model) if runs is None or runs(name)]
    with calls(model) as called, torch.no_grad():
        if names:
            logits()
    for name in names:
        if name not in called:
            raise RecipeError(f"adapter.experts: {name} is not called: its adapter learns nothing", hint=NO_EXPERTS)


@torch.no_grad()
def _is_read(weight: torch.Tensor, before: torch.Tensor, logits: Callable[[], torch.Tensor]) -> bool:
    """Whether the logits depend on a weight; an expert that no token is routed to is not called, and not read."""
    kept = weight.clone()
    weight.zero_()
    try:
        return not torch.equal(logits(), before)
    finally:
        weight.copy_(kept)


def _not_adaptable(layers: Iterable[str], bad: Iterable[str], name: str, why: str) -> RecipeError:
    good = sorted(_last_parts(layers) - _last_parts(bad))
    return RecipeError(
        f"adapter.target_modules: {name} cannot be adapted: {why}",
        hint=f"leave it out: adapter.target_modules: [{', '.join(good)}]" if good else "train the model in full",
    )


def saved_modules(model: PreTrainedModel, patterns: Sequence[str]) -> list[str]:
    """Full names of the modules that are trained in full, by names or globs; outermost ones only.

    A module that shares its weight with another stands for both: they stay one tensor. A reward model's score is one
    of them whether it is named or not.
    """
    owning = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    chosen = select(patterns, owning, "adapter.modules_to_save")
    if has_score(model):
        chosen += [name for name, module in model.named_modules() if module is head_layer(model)]
    return [name for name in dict.fromkeys(chosen) if not any(name.startswith(f"{other}.") for other in chosen)]


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that an adapter may adapt, by name."""
    return {name: module for name, module in model.named_modules() if adaptable.is_linear(module)}


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of every layer that holds an adapter of any kind of peft's."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of every layer that holds the adapter."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@contextmanager
def adapter_off(model: nn.Module, compiled: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Have the model compute what it does without its adapter, for the length of the block.

    Neither its parameters nor what of them is trained changes, as peft's own switch would have it. What is trained
    besides the adapter (``modules_to_save``, rows of new tokens) stays.

    Layers that are ``compiled`` compute by the program that trains: what A makes is multiplied by a number there, 0 in
    this block. Without A and B it would be another program, which rounds otherwise, and one more to compile.
    """
    inside = {module for block in compiled for module in block.modules()}
    layers, experts = [layer for _, layer in adapter_layers(model)], list[Any](adapted_experts(model).values())
    takers = [layer for layer in layers if Wrapper.ADAPTED in wrappers_of(layer)] + experts
    by_number = inside.intersection(takers)
    layers = [layer for layer in layers if layer not in by_number]
    experts = [module for module in experts if module not in by_number]
    switches = [_switch_of(module) for module in by_number]

    def turn(is_on: bool) -> None:
        for switch in switches:
            switch.fill_(is_on)
        for layer in layers:
            layer._disable_adapters = not is_on
        for module in experts:
            module.lora.is_on = is_on

    turn(False)
    try:
        yield
    finally:
        turn(True)


def _switch_of(module: nn.Module) -> torch.Tensor:
    """The number of a module; made when it is first asked for, which is before the module's program is."""
    found: torch.Tensor | None = getattr(module, adaptable.SWITCH, None)
    if found is None:
        found = torch.ones((), device=next(module.parameters()).device)
        setattr(module, adaptable.SWITCH, found)
    return found


def train_besides(model: PreTrainedModel, saved: Sequence[str]) -> None:
    """Let the modules of these names be trained in full besides an adapter; all that is trained is in float32 then."""
    modules = dict(model.named_modules())
    for name in saved:
        _train_in_full(model, modules[name])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _train_in_full(model: PreTrainedModel, module: nn.Module) -> None:
    """Let the module's parameters be trained, wherever in the model they are used."""
    module.requires_grad_(True)
    rounded = {parameter for parameter in module.parameters() if parameter.dtype == torch.bfloat16}
    for user in model.modules():
        if any(parameter in rounded for parameter in user.parameters(recurse=False)):
            user.register_forward_hook(_in_autocast_type)


def _in_autocast_type(module: nn.Module, inputs: Any, output: Any) -> Any:
    """What a float32 module inside a bfloat16 model hands on: LayerNorm on the CPU takes no float32 from it."""
    if isinstance(output, torch.Tensor) and torch.is_autocast_enabled(output.device.type):
        return output.to(torch.get_autocast_dtype(output.device.type))
    return output


def _target_names(model: PreTrainedModel, spec: LoraSpec, saved: Iterable[str]) -> list[str]:
    """Full names of the layers to adapt. What is trained in full needs no adapter."""
    linear = linear_layers(model)
    if spec.target_modules == "all-linear":
        chosen = _adaptable(model, linear)
    else:
        wanted = [spec.target_modules] if isinstance(spec.target_modules, str) else spec.target_modules
        refuse_others(model, wanted, linear)
        chosen = select(wanted, linear, "adapter.target_modules")
    full = tuple(saved)
    left = [name for name in chosen if not any(name == other or name.startswith(f"{other}.") for other in full)]
    if not left:
        raise RecipeError(
            "adapter.target_modules: no linear layer is left to adapt",
            hint="adapter.modules_to_save trains them all in full; write adapter.kind: none to train the whole model",
        )
    return left


def refuse_others(model: PreTrainedModel, wanted: Iterable[str], linear: Mapping[str, nn.Module]) -> None:
    """Refuse a pattern that means modules with weights, and no linear layer among them. Raises RecipeError."""
    owning = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    for pattern in wanted:
        others = [name for name in sorted(owning - linear.keys()) if means(pattern, name)]
        if others and not any(means(pattern, name) for name in linear):
            kind = type(model.get_submodule(others[0])).__name__
            raise RecipeError(
                f"adapter.target_modules: {pattern!r} means {others[0]}, a {kind}: only linear layers get an adapter",
                hint=f"leave it out there, and train it in full: adapter.modules_to_save: [{pattern}]",
            )


def tied_layers(model: nn.Module) -> dict[str, str]:
    """Adapted layers that share their weight with another module, and that one: merging would change both."""
    weights = {id(adaptable.held_tensor(layer.get_base_layer())): name for name, layer in lora_layers(model)}
    named = [(name, weights.get(id(weight))) for name, weight in model.named_parameters(remove_duplicate=False)]
    return {own: name.removesuffix(".weight") for name, own in named if own and not name.startswith(f"{own}.")}


def _adaptable(model: PreTrainedModel, linear: Mapping[str, nn.Module]) -> list[str]:
    """Names of all linear layers but the output layer and those that cannot be adapted, which a warning names once."""
    inside = {name: module for name, module in linear.items() if module is not model.get_output_embeddings()}
    bad = adaptable.not_adaptable(model, inside)
    if bad and next(model.parameters()).device.type != "meta":
        reasons = {why: sorted(_last_parts(name for name, each in bad.items() if each == why)) for why in bad.values()}
        told = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        pass_on(f"adapter.target_modules: all-linear leaves out {told}")
    return [name for name in inside if name not in bad]


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _shortest(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The same layers by their last name components, where these name no other layer; else in full.

    Of a multimodal model always in full: peft seeks them in the whole model, whose other parts have such layers too.
    """
    if is_part(model):
        return list(targets)
    last = {name.rpartition(".")[2] for name in targets}
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if set(same) == set(targets) else list(targets)


# Linear layers whose names peft takes for those of routed experts, and how they are adapted all the same.
#
# transformers 4 had a layer for each weight of each expert; transformers 5 has one tensor for the weights of all. So
# that adapters of then can be loaded, peft reads ``gate_proj`` in such a mixture as that tensor, wherever a layer of
# this name lies: it passes over dense layers and shared experts, and adapts the routed experts, when an adapter is made
# and when it is loaded. Whether it does depends on a layer's last name and the model's type alone.

def taken_for_experts(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Those of the layers by ``names`` in whose place peft would adapt the routed experts of a model like this."""
    taken = {last for last in _last_parts(names) if _is_taken(model, last)}
    return [name for name in names if name.rpartition(".")[2] in taken]


def _is_taken(model: PreTrainedModel, last: str) -> bool:
    config: Any = LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # it wants the experts' other weight named as well, which lies in the same tensor
        return True
    return last not in config.target_modules
