"""Which layers of a model are split, and how: the plan that transformers' config class carries, held to the model.

A plan names layers (``layers.*.self_attn.q_proj``) and the style of each. It says nothing of what it does not name, so
a block whose split layers have numbers between them that only some processes hold is split where the plan names every
parameter of the block. What is not split (norms, routers, experts) is on all processes of a group.
"""

import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.adaptable import QUANTIZED
from tuner.model.build import decoder_of
from tuner.model.native.layers import Factor
from tuner.model.table import is_plain

# Whether an MLP makes each number between its projections of the same column alone, so that columns can be split.
#
# A plan says which projections are split, not what lies between them: Gemma 3n lets the largest numbers of a position
# through, by the mean and the spread of all of its columns, and is planned as any other MLP. Here the class's own
# forward runs on small rows, with projections that only scale: what it gives of some columns must be what it gives them
# in all.

_COLUMNS = 16


@torch.no_grad()
def goes_by_columns(module: nn.Module, projections: Collection[str]) -> bool:
    """Whether a module with these projections, on any device, computes columns one by one between them."""
    bare: Any = copy.copy(module)
    factors = {name: Factor(1.5 - number) for number, name in enumerate(projections)}
    bare._modules = {**module._modules, **factors}
    rows = torch.linspace(-4, 6, 3 * _COLUMNS).reshape(3, _COLUMNS).sin().mul(3)[None]
    try:
        whole = type(module).forward(bare, rows)
        parts = [type(module).forward(bare, part) for part in rows.split([5, _COLUMNS - 5], -1)]
    except Exception:  # noqa: BLE001 - of the model's own code, which wants more than rows
        return False
    return isinstance(whole, torch.Tensor) and torch.allclose(whole, torch.cat(parts, -1), rtol=1e-5, atol=1e-6)


SplitWay = Literal["columns", "rows", "columns_gathered", "rows_of_own", "repeated", "partial_norm", "gathered_norm"]
"""How a layer is computed: ``columns`` and ``rows`` of its product (Megatron-LM); columns that are gathered, and rows
of a whole input of which each process takes its own; ``repeated``, whole on each process, which takes the heads that it
needs; a norm over each head, of which a process sees its own heads; and a norm over all heads, which are gathered."""

_STYLES: Mapping[str, SplitWay] = {
    "colwise": "columns", "rowwise": "rows", "colwise_gather_output": "columns_gathered",
    "rowwise_split_input": "rows_of_own", "replicated_with_grad_allreduce": "partial_norm",
}
_LINEAR = ("columns", "rows", "columns_gathered", "rows_of_own")
_BY_HEADS = frozenset({"q_proj", "k_proj", "v_proj", "query_key_value"})
"""Layers of attention whose outputs are heads, one after the other."""
_UNLIKE = frozenset({"gemma4_unified_text", "minimax_m3_vl_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text"})
"""Types whose plans were tried, and did not give the step of one process (`tools/tensor_campaign.py`)."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class LayerSplit:
    """A module, such as the attention of a layer, some of whose own layers are split: their ways by their names."""

    name: str
    module: nn.Module
    ways: Mapping[str, SplitWay]
    head_dim: int = 0
    """Numbers of a head; 0 where the part has none."""

    def named(self, *ways: SplitWay) -> list[str]:
        """Its layers that are computed in one of these ways."""
        return [name for name, way in self.ways.items() if way in ways]


def check_split(model: PreTrainedModel, size: int) -> None:
    """Check that so many processes can compute the layers of a model together; on the meta device too.

    Raises RecipeError with what stands in the way, and with the numbers of processes that would do.
    """
    parts_of(model, size)


def parts_of(model: PreTrainedModel, size: int) -> list[LayerSplit]:
    """What of a model is split over so many processes, in order. Raises RecipeError as :func:`check_split` does."""
    decoder, kind = decoder_of(model), model.config.get_text_config().model_type
    plan: Mapping[str, str] | None = getattr(decoder.config, "base_model_tp_plan", None)
    if not plan:
        raise _refused(f"transformers has no plan of how to split a {kind} model")
    if kind in _UNLIKE:
        raise _refused(f"split as its plan says, a {kind} model was not shown to compute what it does in one process")
    by_part = _planned(decoder, plan)
    _require_dropout_free(model)
    _require_plain_ends(model)
    parts = []
    for name, styles in by_part.items():
        module = decoder.get_submodule(name)
        part = LayerSplit(name, module, _ways(kind, name, module, styles), _head_dim(decoder, module))
        _require_known(kind, part)
        parts.append(_over(part, decoder, size))
    if not parts:
        raise _refused(f"the plan of a {kind} model names none of its layers")
    return parts


def _planned(decoder: nn.Module, plan: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The styles of planned layers, by the name of the module that they are in and their own."""
    found: dict[str, dict[str, str]] = {}
    for name, _ in [*decoder.named_modules(), *decoder.named_parameters()]:
        style = plan.get(_NUMBER.sub(".*", name), plan.get(name))
        holder, _, last = name.rpartition(".")
        if style is not None and not _is_of_experts(name, plan):
            found.setdefault(holder, {})[last] = style
    return found


def _is_of_experts(name: str, plan: Mapping[str, str]) -> bool:
    """Whether this is the module of a layer's routed experts, or in it: each process of a group has all of them."""
    words = _NUMBER.sub(".*", name).split(".")
    return any("expert" in plan.get(".".join(words[:end]), "") for end in range(1, len(words) + 1))


def _ways(kind: str, name: str, module: nn.Module, styles: Mapping[str, str]) -> dict[str, SplitWay]:
    ways: dict[str, SplitWay] = {}
    for last, style in styles.items():
        if style not in _STYLES:
            raise _refused(f"the plan of a {kind} model has {name}.{last} as {style!r}, which tuner does not split")
        layer, way = getattr(module, last), _STYLES[style]
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        if type(base).__name__ == QUANTIZED:
            raise _refused(f"{name}.{last} is quantised", "write model.quantize: none, or parallel.tensor: 1")
        if way in _LINEAR and not isinstance(base, nn.Linear):
            raise _refused(f"{name}.{last} of a {kind} model is a {type(base).__name__}, which tuner does not split")
        ways[last] = way
    return ways


def _require_known(kind: str, part: LayerSplit) -> None:
    """Raise RecipeError where a part has anything that might see some of the columns, and is not in the plan."""
    columns, rows = part.named("columns"), part.named("rows")
    if bool(part.named("columns_gathered")) != bool(part.named("rows_of_own")):
        raise _refused(f"the plan of a {kind} model splits layers of {part.name} whose results it all gathers")
    if bool(columns) != bool(rows):
        raise _refused(f"the plan of a {kind} model splits {part.name}.{(columns or rows)[0]} alone")
    if not columns:
        return
    owners = [name for name, child in part.module.named_children() if any(True for _ in child.parameters())]
    own = [name for name, _ in part.module.named_parameters(recurse=False)]
    unknown = [name for name in [*owners, *own] if name not in part.ways]
    if unknown:
        raise _refused(f"the plan of a {kind} model does not say what becomes of {part.name}.{unknown[0]}")
    strange = [name for name in columns if part.head_dim and name not in _BY_HEADS]
    if strange:
        raise _refused(f"tuner does not know how the heads lie in {part.name}.{strange[0]} of a {kind} model")
    if not part.head_dim and not goes_by_columns(part.module, [*columns, *rows]):
        raise _refused(f"{part.name} of a {kind} model is not shown to compute columns one by one between its layers")
    norms = {name: getattr(part.module, name) for name in part.named("partial_norm")}
    wide = [name for name, norm in norms.items() if any(one.numel() != part.head_dim for one in norm.parameters())]
    if wide:
        raise _refused(f"{part.name}.{wide[0]} of a {kind} model has more weights than a head has numbers")


def _over(part: LayerSplit, decoder: nn.Module, size: int) -> LayerSplit:
    """The part as so many processes compute it. Raises RecipeError where they cannot."""
    ways = dict(part.ways)
    heads = int(getattr(decoder.config, "num_attention_heads", 0))
    if part.head_dim and not heads % size:
        ways |= _by_heads(part, _norms_over_heads(part), size)
    for name, way in ways.items():
        width = _width(part, name, way)
        if part.head_dim and way == "columns":
            ways[name] = _way_of_heads(part, name, heads, size)
        elif width % size:
            raise _refused(f"{part.name}.{name} is {width:,} wide, which {size} does not divide", _instead(width))
    return LayerSplit(part.name, part.module, ways, part.head_dim)


def _way_of_heads(part: LayerSplit, name: str, heads: int, size: int) -> SplitWay:
    """How a layer is computed that gives heads: as many as the config counts, or fewer, of keys or values."""
    there = _width(part, name, "columns") // part.head_dim
    if heads % size:
        raise _refused(f"{part.name} has {heads} heads, which {size} does not divide", _instead(heads))
    if name == "q_proj" and there != heads:
        raise _refused(f"{part.name}.q_proj gives {there} heads where the config counts {heads}")
    if there % size == 0:
        return "columns"
    if size % there == 0:
        return "repeated"
    numbers = [number for number in _divisors(heads) if there % number == 0 or number % there == 0]
    raise _refused(
        f"{part.name}.{name} gives {there} heads: {size} processes neither divide nor multiply them",
        f"write {_listed(numbers)}",
    )


def _norms_over_heads(part: LayerSplit) -> list[str]:
    """Norms over all heads at once, between projections that the plan therefore gathers (OLMo 2)."""
    if set(part.named("columns_gathered")) != {"q_proj", "k_proj", "v_proj"} or part.named("rows_of_own") != ["o_proj"]:
        return []
    widths = {f"{one}_norm": _width(part, f"{one}_proj", "columns") for one in ("q", "k")}
    others = {name for name, child in part.module.named_children() if any(True for _ in child.parameters())}
    norms = {name: getattr(part.module, name, None) for name in widths}
    whole = all(getattr(getattr(norm, "weight", None), "shape", None) == (widths[n],) for n, norm in norms.items())
    return [*widths] if whole and others == {*part.ways, *widths} else []


def _by_heads(part: LayerSplit, norms: list[str], size: int) -> dict[str, SplitWay]:
    """Such a part with its heads split: they are gathered for the norms alone, and attention is not repeated."""
    if not norms or any(_width(part, name, "columns") // part.head_dim % size for name in ("k_proj", "v_proj")):
        return {}
    ways: dict[str, SplitWay] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "columns")
    return {**ways, "o_proj": "rows", **dict.fromkeys(norms, "gathered_norm")}


def _width(part: LayerSplit, name: str, way: SplitWay) -> int:
    """What is divided: outputs or inputs of a linear layer; nothing of a norm."""
    layer = getattr(part.module, name)
    if way in ("partial_norm", "gathered_norm"):
        return 0
    return int(layer.in_features if way in ("rows", "rows_of_own") else layer.out_features)


def _head_dim(decoder: nn.Module, module: nn.Module) -> int:
    if not any(hasattr(module, name) for name in _BY_HEADS):
        return 0
    config = decoder.config
    said = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return int(said or config.hidden_size // config.num_attention_heads)  # type: ignore[union-attr, operator]


def _require_dropout_free(model: PreTrainedModel) -> None:
    """Raise RecipeError where attention has dropout: its shares are drawn for all heads at once."""
    share = float(getattr(model.config.get_text_config(), "attention_dropout", None) or 0.0)
    if share > 0:
        raise _refused(f"its attention has dropout ({share:g}), which is drawn for all heads at once")


def _require_plain_ends(model: PreTrainedModel) -> None:
    """Raise RecipeError where the vocabulary cannot lie over processes."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if hasattr(head, "get_base_layer"):
        raise _refused(
            "the output layer has an adapter, and its rows lie over processes",
            "leave it out of adapter.target_modules, or move it to adapter.modules_to_save",
        )
    if head is not None and head.weight is embedding.weight and not is_plain(embedding):
        raise _refused(f"the output layer is tied to a {type(embedding).__name__}, which does more than look rows up")


def _refused(why: str, hint: str = "write parallel.tensor: 1, and shard over more processes") -> RecipeError:
    return RecipeError(f"parallel.tensor: {why}", hint=hint)


def _instead(width: int) -> str:
    return f"write {_listed(_divisors(width))}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, 64) + 1) if gcd(number, size) == size]


def _listed(numbers: list[int]) -> str:
    return "parallel.tensor: " + " or ".join(map(str, numbers))
