"""Faults of what layers compute, planted in a model as training builds it; its plain twin goes without them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tuner.model.build import decoder_blocks
from tuner.model.documents import Documents
from tuner.model.root import CausalLM

PLACES: dict[str, Callable[[int], Sequence[int]]] = {
    "all layers": range,
    "last layer": lambda count: [count - 1],
    "one in the middle": lambda count: [count // 2 + 1],
}
Change = Callable[[Any], None]
"""What is done to a decoder layer."""


@dataclass(frozen=True)
class Fault:
    """A fault in some of a model's layers."""

    name: str
    model_type: str
    change: Change
    places: Callable[[int], Sequence[int]]
    adapter: bool = False
    of_values: bool = False
    """Whether structure does not tell the layer from others."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What has to be so while the model is built and proven."""

    def plant(self, root: CausalLM) -> None:
        """Change the layers, in place."""
        blocks = decoder_blocks(root.model)
        for place in self.places(len(blocks)):
            self.change(blocks[place])


def _part(block: nn.Module, *ends: str) -> Any:
    """The first part of a layer whose name ends so."""
    return next(part for name, part in block.named_modules() if name.endswith(ends))


def _with(key: str, value: Any, *ends: str) -> Change:
    """Sets an attribute of a part."""

    def change(block: nn.Module) -> None:
        part = _part(block, *ends)
        assert hasattr(part, key), (type(part), key)
        setattr(part, key, value(getattr(part, key)) if callable(value) else value)

    return change


def _given(key: str, made: Callable[[Any], Any], *ends: str) -> Change:
    """Changes an argument of a part's forward."""

    def change(block: nn.Module) -> None:
        part = _part(block, *ends)
        forward = part.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            assert key in kwargs, (type(part), key, list(kwargs))
            return forward(*args, **{**kwargs, key: made(kwargs[key])})

        part.forward = changed

    return change


def _gives(made: Callable[[Any, Any], Any], *ends: str) -> Change:
    """Changes what a part, or the layer, gives."""

    def change(block: nn.Module) -> None:
        part: Any = _part(block, *ends) if ends else block
        forward = part.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            return made(given, forward(*args, **kwargs))

        part.forward = changed

    return change


def _first(made: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def of(given: Any, output: Any) -> Any:
        return (made(given, output[0]), *output[1:]) if isinstance(output, tuple) else made(given, output)

    return of


def _one_document(documents: Any) -> Any:
    return Documents.of((int(documents.host[-1]),), documents.device.device, None, 0)


def _flat_state(block: nn.Module) -> None:
    """A mixer of states gets the whole row, as if it were one document."""
    for name, part in block.named_modules():
        if name and "forward" in vars(part) and not name.endswith(("self_attn", "attention")):
            part.forward = partial(type(part).forward, part)


def _hooked(block: nn.Module) -> None:
    block.register_forward_hook(lambda module, inputs, output: _first(lambda _, made: made + 0.01)(None, output))


def _uncalled(block: nn.Module) -> None:
    """An adapted layer whose weight is read without a call of it."""
    mlp = _part(block, "mlp")

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        inside = mlp.act_fn(mlp.gate_proj(hidden)) * mlp.up_proj(hidden)
        return nn.functional.linear(inside, mlp.down_proj.get_base_layer().weight)

    mlp.forward = forward


def _numbered(is_one: Callable[[int], bool]) -> Change:
    """MLPs that compute otherwise in layers of some numbers: one function for all."""

    def change(block: nn.Module) -> None:
        mlp = _part(block, "mlp")
        mlp.layer_idx, forward = _part(block, "self_attn").layer_idx, mlp.forward

        def counted(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = forward(x)
            return 2 * made if mlp.layer_idx == 5 else made

        def counted_off(x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = forward(x)
            return 2 * made if mlp.layer_idx % 4 == 2 else made

        mlp.forward = counted_off if is_one(2) else counted

    return change


@contextmanager
def _numbered_class() -> Iterator[None]:
    """The class's own code computes otherwise in one layer, where training built it."""
    kept = LlamaMLP.forward
    LlamaMLP.layer_idx = -1

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kept(self, x)
        return 2 * made if self.layer_idx == 5 else made

    LlamaMLP.forward = forward
    try:
        yield
    finally:
        LlamaMLP.forward = kept
        del LlamaMLP.layer_idx


def _number(block: nn.Module) -> None:
    _part(block, "mlp").layer_idx = _part(block, "self_attn").layer_idx


@contextmanager
def _bounded_norms() -> Iterator[None]:
    """Norms take no weight above 2, as training builds them; the plain twin's are right."""
    kept = LlamaRMSNorm.forward

    def bounded(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kept(self, hidden_states)
        return made.clamp(-40, 40) if getattr(self, "is_bounded", False) else made

    LlamaRMSNorm.forward = bounded
    try:
        yield
    finally:
        LlamaRMSNorm.forward = kept


def _bounded(block: nn.Module) -> None:
    norm = _part(block, "post_attention_layernorm")
    norm.is_bounded = True
    if _part(block, "self_attn").layer_idx == 4:
        norm.weight.data.mul_(50)


def _unrotated(given: Any) -> Any:
    return torch.ones_like(given[0]), torch.zeros_like(given[1])


def _one_place_on(given: Any) -> Any:
    return tuple(part.roll(1, 1) for part in given)


_EVERYWHERE = tuple(PLACES)
_FEW = ("last layer", "one in the middle")
_ATTENTION = ("self_attn", "attn", "attention")
_CHANGES: tuple[tuple[str, str, Change, tuple[str, ...]], ...] = (
    # masks
    ("a window is forgotten", "qwen2", _with("sliding_window", None, *_ATTENTION), _EVERYWHERE),
    ("a window of another length", "gpt_oss", _with("sliding_window", 3, *_ATTENTION), _EVERYWHERE),
    ("documents are one in attention", "llama", _given("documents", _one_document, "self_attn"), _EVERYWHERE),
    ("documents are one in attention", "gemma2", _given("documents", _one_document, "self_attn"), _FEW),
    ("documents are one in attention", "qwen3_moe", _given("documents", _one_document, "self_attn"), _FEW),
    # rotations
    ("no rotation", "llama", _given("position_embeddings", _unrotated, "self_attn"), _EVERYWHERE),
    ("a rotation by one more", "qwen3", _given("position_embeddings", _one_place_on, "self_attn"), _FEW),
    ("a rotation backwards", "olmo2", _given("position_embeddings", lambda p: (p[0], -p[1]), "self_attn"), _FEW),
    ("another scale of scores", "llama", _with("scaling", lambda s: s * 1.1, "self_attn"), _EVERYWHERE),
    ("another scale of scores", "gemma3_text", _with("scaling", lambda s: s * 1.1, "self_attn"), _FEW),
    # states
    ("a state over documents", "mamba2", _flat_state, _EVERYWHERE),
    ("a state over documents", "falcon_h1", _flat_state, _FEW),
    ("a state over documents", "qwen3_next", _flat_state, ("all layers",)),
    ("a state over documents", "lfm2_moe", _flat_state, ("all layers",)),
    # routers
    ("one expert a token", "mixtral", _with("top_k", 1, "gate", "router"), _EVERYWHERE),
    ("shares that do not add up to one", "qwen3_moe", _with("norm_topk_prob", lambda on: not on, "gate"), _FEW),
    # all else
    ("another activation", "llama", _gives(lambda given, _: given.relu(), "act_fn"), _EVERYWHERE),
    ("another epsilon", "qwen3", _with("variance_epsilon", 0.3, "input_layernorm"), _FEW),
    ("no norm of queries", "qwen3", _gives(lambda given, _: given, "q_norm"), _FEW),
    ("no residual", "llama", _gives(_first(lambda given, made: made - given)), _EVERYWHERE),
    ("a layer that is left out", "llama", _gives(_first(lambda given, made: given)), _FEW),
    ("a hook that adds", "llama", _hooked, _EVERYWHERE),
    ("values that are rounded", "llama", _gives(lambda _, made: made.bfloat16().float(), "mlp"), _FEW),
    ("a doubled MLP", "gpt2", _gives(lambda _, made: 2 * made, "mlp"), _FEW),
    ("a later token seen", "llama", _gives(_first(lambda _, made: made + 0.1 * made.roll(-1, 1)), "self_attn"), _FEW),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    *(
        Fault(f"{name}, {model_type}, {where}", model_type, change, PLACES[where])
        for name, model_type, change, places in _CHANGES
        for where in places
    ),
    *(Fault(f"an adapter that is not called, {where}", "llama", _uncalled, PLACES[where], True) for where in PLACES),
    Fault("code that knows a number", "llama", _numbered(lambda number: number == 5), PLACES["all layers"]),
    Fault("code that counts layers off", "llama", _numbered(lambda number: number % 4 == 2), PLACES["all layers"]),
    Fault("a class that knows a number", "llama", _number, PLACES["all layers"], around=_numbered_class),
    Fault(
        "a large weight of one layer", "llama", _bounded, PLACES["all layers"], of_values=True, around=_bounded_norms
    ),
)
