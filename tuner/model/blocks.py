"""Decoder layers whose forward is run again in the backward pass instead of being remembered, or is compiled.

Recomputing: ``full`` keeps a layer's input alone (Chen et al. 2016, https://arxiv.org/abs/1604.06174). ``selective``
also keeps the results of matrix products and of attention kernels, which cost the time, and makes the rest again:
norms, activations, rotations, casts (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Gradients are the
plain model's: the same operations on the same numbers, with the same random numbers where there is dropout.

Compiling (torch.compile): layers one by one, so that one program serves all that are alike, for every packing.
Embedding, output layer and loss stay as they are. Attention over documents is one opaque operation, and where documents
lie is data to it. Code that asks the device how much there is to do, or changes a weight, stays outside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tuner.model import transformers_private
from tuner.model.build import decoder_blocks, decoder_of
from tuner.model.documents import Padding
from tuner.model.flops import n_experts
from tuner.model.freeze import select
from tuner.model.root import CausalLM
from tuner.model.transformers_private import note_recorded, take_recorders
from tuner.model.wrap import Wrapper, names_in, wrap, wrappers_of
from tuner.runtime.torch_private import allow_notes_in_checkpoints, schema

if TYPE_CHECKING:
    from tuner.model.offload import HostInputs
    from tuner.model.replay import Contexts


# What routers say inside compiled layers, handed out as results of the layers.
#
# transformers notes what a module returns by hooks that append to a dictionary of the forward that runs. Inside a
# compiled layer such a hook ends the graph, and inside one that is computed again too it may change nothing outside.
# Here a layer returns what its routers say besides its own result, and the hook runs outside, on that result.

ROUTERS = "router_logits"
_MARK = "router_hooks"


def hand_out(block: nn.Module, decoder: nn.Module) -> bool:
    """Have a layer's forward return ``(result, (what each router said, ...))``, in place; False: it has no router.

    Before whatever computes the layer again or compiles it. Asked twice it is done once.
    """
    forward: Callable[..., Any] = block.forward
    if getattr(forward, _MARK, False):  # of any function around it, too: `wraps` hands it on
        return True
    transformers_private.install_recorders(decoder)
    said: list[Any] = []
    has_router = False
    for module in block.modules():
        if module is block:
            continue  # that hook is called outside of the forward
        for found in take_recorders(module):  # the others note attention's weights, which training has none of
            if found.key == ROUTERS:
                module.register_forward_hook(lambda *given, found=found: said.append(found.of(given[2])))
                has_router = True
    if not has_router:
        return False

    @wraps(forward)
    def heard(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        said.clear()
        made = forward(*args, **kwargs)
        notes = tuple(said)
        said.clear()  # after the forward it is as before, and no tensor leaves what is computed again but as a result
        return made, notes

    setattr(heard, _MARK, True)
    wrap(block, Wrapper.ROUTERS, heard)
    return True


BACKEND = "inductor"
_LAST_NORMS = ("norm", "final_norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm")
"""The norm after the last layer, as classes of transformers name it: by itself it is twenty small kernels."""
Level = Literal["selective", "full"]
_KEPT = {
    "tuner::adapted_products", "tuner::attend_documents", "tuner::attend_with_sinks", "tuner::flash_attention",
    "tuner::flash_attention_4", "tuner::native_attention", "tuner::quantized_linear", "tuner::triton_attention",
    "torch_attn::_varlen_attn", "aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_grouped_mm",
    "aten::_scaled_mm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward", "aten::_efficient_attention_forward", "aten::_cudnn_attention_forward",
}  # fmt: skip
"""Not ``bmm``: where attention is made of batched products, its scores are what fills the memory."""
_CHEAP = 8
"""A product is made again whose results have so many times the columns that its terms have."""
_keeps = True
"""Whether selective recomputing keeps anything of what is computed now; layers are computed one after the other."""


def apply_recompute(
    root: CausalLM, level: Level, n_layers: int | None = None, compiled: bool = False, modules: Sequence[str] = ()
) -> None:
    """Recompute ``n_layers`` decoder layers, evenly spread, or all of them, in place; before sharding.

    Where names or globs of ``modules`` are given, it is those of these layers in place of whole ones. Raises
    RecipeError for one that means nothing.

    The checkpoint lies inside a layer's forward, so that hooks around it, such as FSDP2's, run once. Routers choose
    the same experts in both runs, but in layers that will be ``compiled``: the compiler knows no such contexts.
    """
    # Random numbers are put back for the second run: a generator's state is read on the CPU, without a wait.
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    contexts: Contexts | None = None
    if level == "selective":
        biased = any(getattr(each, "has_bias", False) and hasattr(each, "num_experts") for each in root.modules())
        policy = _policy_of_biased_experts if biased else _policy
        contexts = partial(create_selective_checkpoint_contexts, policy)
    if not compiled and n_experts(root.model.config.get_text_config()):
        from tuner.model.replay import replayed  # what most models go without

        contexts = partial(replayed, contexts)
    if contexts is not None:
        run = partial(run, context_fn=contexts)
    if compiled:  # what routers say, and an input that split layers share, are kept for the length of a forward
        allow_notes_in_checkpoints()
    blocks = _chosen(root, n_layers)
    for block in _inside(root, blocks, modules) if modules else blocks:
        if compiled:
            hand_out(block, decoder_of(root.model))
        _wrap(block, Wrapper.RECOMPUTED, partial(run, block.forward), lambda block: torch.is_grad_enabled())


def apply_offload(root: CausalLM, n_layers: int | None = None) -> HostInputs:
    """Keep the inputs of the same layers in the host's memory, in place; after compiling, where layers are compiled.

    Returns what moves them.
    """
    from tuner.model.offload import HostInputs  # few trainings do

    inputs = HostInputs()
    for block in _chosen(root, n_layers):
        first = next(iter(inspect.signature(block.forward).parameters))
        run = partial(inputs.run, block.forward, first)
        _wrap(block, Wrapper.OFFLOADED, run, lambda block: torch.is_grad_enabled())
    return inputs


def _chosen(root: CausalLM, n_layers: int | None) -> list[nn.Module]:
    """The decoder layers that are recomputed: so many, evenly spread; None: all."""
    blocks = decoder_blocks(root.model, "train.gradient_checkpointing")
    return [blocks[index] for index in spread(len(blocks), len(blocks) if n_layers is None else n_layers)]


def _inside(root: CausalLM, blocks: Sequence[nn.Module], patterns: Sequence[str]) -> list[nn.Module]:
    """The modules of layers that a pattern means, but for those inside of others, which are recomputed with them."""
    own = {id(module) for block in blocks for module in block.modules()}
    names = [name for name, module in root.model.named_modules() if id(module) in own]
    found: list[str] = []
    for name in select(patterns, names, "train.gradient_checkpointing_modules"):
        if not found or not name.startswith(f"{found[-1]}."):
            found.append(name)
    return [root.model.get_submodule(name) for name in found]


def spread(n_layers: int, chosen: int) -> list[int]:
    """Indices of ``chosen`` of the layers, evenly spread; the last layer, whose turn comes first, is chosen last."""
    return [i * n_layers // chosen for i in range(chosen)]


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """Within, selective recomputing keeps no result: what is computed there is computed again in any case."""
    global _keeps  # noqa: PLW0603
    before, _keeps = _keeps, False
    try:
        yield
    finally:
        _keeps = before


def _policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products and attention. What draws random numbers is made again, so that every draw is repeated."""
    declared = schema(operation)
    if declared.name not in _KEPT or not _keeps:
        return CheckpointPolicy.PREFER_RECOMPUTE
    given = dict(zip((argument.name for argument in declared.arguments), args, strict=False)) | kwargs
    if given.get("dropout_p", 0.0) > 0 or _is_cheap(declared.name, given):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _policy_of_biased_experts(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The same, but the products of experts are made again: transformers adds the bias to the very result (gpt-oss)."""
    if schema(operation).name == "aten::_grouped_mm":
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _policy(ctx, operation, *args, **kwargs)


def _is_cheap(name: str, given: dict[str, Any]) -> bool:
    """Whether a product costs little for what it makes: its rows are sums of far fewer numbers than they have.

    That is an adapter's second product, whose result is as large as that of the layer it is added to.
    """
    first = {"aten::mm": "self", "aten::addmm": "mat1", "aten::_grouped_mm": "self"}.get(name)
    return first is not None and bool(given[first].shape[-1] * _CHEAP <= given["mat2"].shape[-1])


def compile_blocks(root: CausalLM, padding: Padding) -> None:
    """Compile the decoder layers for training, in place; after recomputing is applied and before sharding.

    Every microbatch is filled up to the size of ``padding``, the one for which the layers are compiled. Layers whose
    MLPs are tiled are compiled in parts: before recomputing is applied, which runs those parts again.
    """
    module: Any
    for module in root.modules():
        if type(module).__name__ == "DoraLinearLayer":  # peft's
            _ease_tracing()
            # It is cleared in every forward and, as peft sets it, never filled. A checkpoint that is compiled may not
            # change what lies outside it.
            module._cache_clear = lambda: None
    if root.layout.mixers is not None:
        root.layout.mixers.keep_from_compiler(root.model)
    last_norms = [each for name, each in decoder_of(root.model).named_children() if name in _LAST_NORMS]
    blocks = [*decoder_blocks(root.model, "train.compile"), *last_norms]
    for block, has_gradient in zip(blocks, _inputs_with_gradient(root, blocks), strict=True):
        first = next(iter(inspect.signature(block.forward).parameters))
        keep_outside(block)
        has_router = hand_out(block, decoder_of(root.model))
        compiled = torch.compile(block.forward, backend=BACKEND, dynamic=False)
        # Evaluation and sampling come in many shapes and are rare: they run as they are.
        kind = Wrapper.COMPILED if Wrapper.RECOMPUTED in wrappers_of(block) else Wrapper.PARTS_COMPILED
        _wrap(block, kind, partial(_as_trained, compiled, first, has_gradient), lambda block: block.training)
        if has_router:
            _note_routers(block, kind)
    root.parts.set_once(padding=padding)


def _inputs_with_gradient(root: CausalLM, blocks: Sequence[nn.Module]) -> Iterator[bool]:
    """Of each layer whether what it is given has a gradient in training: whether anything before it is trained."""
    trained = any(parameter.requires_grad for parameter in root.model.get_input_embeddings().parameters())
    for block in blocks:
        yield trained
        trained = trained or any(parameter.requires_grad for parameter in block.parameters())


def _as_trained(compiled: Callable[..., Any], first: str, has_gradient: bool, *args: Any, **kwargs: Any) -> Any:
    """What a compiled layer gives; without gradients, too, by the program that trains, whose saved results are dropped.

    Compiled for no gradients it would be another program, which fuses and so rounds otherwise: a reference that is the
    same model would differ from the policy. ``first`` names the layer's input, which some models give by name;
    ``has_gradient`` says whether it has a gradient in training.
    """
    if torch.is_grad_enabled():
        return compiled(*args, **kwargs)
    hidden, *others = args if args else (kwargs.pop(first),)
    with torch.enable_grad():  # for the layer alone: what shards or offloads it takes this for the forward that it is
        return _detached(compiled(hidden.detach().requires_grad_(has_gradient), *others, **kwargs))


def _detached(made: Any) -> Any:
    """The same without a graph, of a tensor or a tuple of them."""
    if isinstance(made, tuple):
        return tuple(map(_detached, made))
    return made.detach() if isinstance(made, torch.Tensor) else made


@cache
def _ease_tracing() -> None:
    """Tell the compiler what peft's function for weights of any kind gives for one that is not quantised: itself.

    It asks for the kind by the name of the tensor's class, which the compiler of torch 2.13 cannot follow.
    """
    from peft.utils.integrations import dequantize_module_weight

    @torch.compiler.substitute_in_graph(dequantize_module_weight)
    def weight(module: nn.Module) -> nn.Parameter:
        return module.weight  # type: ignore[return-value]


def _note_routers(block: nn.Module, kind: Wrapper) -> None:
    """Have what a layer's routers say noted outside of its program, as transformers' hooks would have, and the layer's
    own result handed on."""
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        made, said = forward(*args, **kwargs)
        for one in said:
            note_recorded(ROUTERS, one)
        return made

    wrap(block, kind, run)


def _wrap(block: nn.Module, kind: Wrapper, instead: Callable[..., Any], wanted: Callable[[nn.Module], bool]) -> None:
    """Have a layer run ``instead`` of its forward where that is ``wanted``."""
    forward = block.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return instead(*args, **kwargs) if wanted(block) else forward(*args, **kwargs)

    wrap(block, kind, run)


_ASKS = frozenset({"nonzero", "item"})
_HANDS_ON = "tolist"
_CHANGES = "clamp_"
"""What Gemma 3n's layers do to a weight of theirs in each forward: for a program a change of what it is given."""


def handing_on_counts(model: nn.Module) -> str | None:
    """The class of a module whose forward makes Python's numbers of what the device computed; None: there is none."""
    return next((type(one).__name__ for one in model.modules() if _HANDS_ON in names_in(type(one).forward)), None)


def is_in_parts(root: CausalLM) -> bool:
    """Whether layers of a model are compiled in parts, with something that stays outside between them."""
    recurrent = root.layout.mixers is not None and bool(root.layout.mixers.names)
    modules = [module for block in decoder_blocks(root.model) for module in block.modules()]
    return recurrent or any(next(_left_out(module), None) for module in modules)


def keep_outside(block: nn.Module) -> None:
    """Leave to the interpreter, in place, what asks the device how much there is to do, or changes a weight."""
    for module in block.modules():
        for name in list(_left_out(module)):
            outside = torch.compiler.disable(getattr(module, name))
            wrap(module, Wrapper.UNCOMPILED, outside) if name == "forward" else setattr(module, name, outside)


def _left_out(module: nn.Module) -> Iterator[str]:
    """The methods of a module that stay outside."""
    if not _ASKS.isdisjoint(names_in(type(module).forward)):  # where it dispatches to grouped products, what that reads
        yield "forward"
    yield from (name for name, method in vars(type(module)).items() if _CHANGES in names_in(method))
