"""LoRA on the routed experts of a mixture: matrices A and B of its own for each weight of each expert.

transformers 5 keeps the weights of all experts of a layer in two tensors, ``[E, out, in]`` or transposed. Next to each
lie ``A [E, r, in]`` and ``B [E, out, r]`` in float32, parameters of the same module: what splits experts over
processes, or shards them, finds them there. The rows of an expert e are computed by

    y = x W_e^T + bias + s · (dropout(x) A_e^T) B_e^T

as in peft's layers; the sum ``W + s·B·A`` is never made in training. The products are those by which transformers
computes experts (a grouped product over rows that lie by experts, or one product for each expert where its
implementation is ``eager``), and so are gates, biases and the order of sums: a model whose B are zero computes what it
did, to the last bit where products are grouped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model import transformers_private
from tuner.model.adaptable import SWITCH
from tuner.model.experts import LORA_A, LORA_B, NO_EXPERTS, routed_experts
from tuner.model.flops import n_experts

KEY = "adapter.experts"
_ALIGNED = 16
"""Bytes of which the rows of grouped products are multiples; ranks are filled up with zeros."""


class AdaptedExperts(nn.Module):
    """What the class of a layer's experts becomes a subclass of, in front of its own forward."""

    lora: ExpertsLora

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts make of tokens ``[T, D]``, each of which goes to ``[T, K]`` of them with such weights.

        As transformers' `grouped_mm_experts_forward`, with what the adapters add.
        """
        module: Any = self
        per_token = top_k_index.shape[-1]
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        counts = experts.new_zeros(module.num_experts).scatter_add_(0, experts, torch.ones_like(experts))
        groups = _Groups(experts, counts, transformers_private.computes_in_groups(module))
        first, second = weight_names(module)
        inner = _projected(module, first, hidden_states[order // per_token], groups)
        inner = transformers_private.apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
        made = _projected(module, second, inner, groups)
        if getattr(module, "has_post_expert_norm", False):
            made = module.post_expert_norm(made)
        weighed = made * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return weighed[places].view(len(hidden_states), per_token, -1).sum(1).to(hidden_states.dtype)


@dataclass
class ExpertsLora:
    """How the adapter of a layer's experts is added."""

    rank: int
    scale: float
    dropout: float
    is_on: bool = True


def adapt_experts(model: PreTrainedModel, lora: ExpertsLora, saved: Iterable[str]) -> None:
    """Give each weight of a model's routed experts an adapter, in place; ``saved`` modules are trained in full.

    A is drawn from torch's generator as peft draws (uniform up to 1 / sqrt(in)), B is zero; on a meta model both are on
    meta. Raises RecipeError for a model without routed experts by transformers' interface, and where they are trained
    in full.
    """
    if not (found := routed_experts(model)):
        why = "has no routed experts"
        if n_experts(model.config.get_text_config()):
            why = "computes its experts by code of its own, and not by transformers' interface of experts"
        raise RecipeError(f"{KEY}: {type(model).__name__} {why}", hint=NO_EXPERTS)
    for name, module in found.items():
        if any(name == one or name.startswith(f"{one}.") for one in saved):
            raise RecipeError(
                f"{KEY}: adapter.modules_to_save trains {name} in full",
                hint="leave it out of modules_to_save, or write experts: false",
            )
        weights = {each: getattr(module, each, None) for each in weight_names(module)}
        for each, weight in weights.items():
            if not isinstance(weight, nn.Parameter) or weight.ndim != 3:  # noqa: PLR2004 - [E, out, in]
                raise RecipeError(f"{KEY}: {name} has no {each} of all experts", hint=NO_EXPERTS)
            _add(module, each, weight, lora.rank)
        vars(module)["lora"] = replace(lora)
        module.__class__ = _adapted(type(module))  # type: ignore[arg-type]  # a class has a hash


def weight_names(module: Any) -> tuple[str, str]:
    """Names of the two weights of a layer's experts, in the order in which they are used."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _add(module: Any, name: str, weight: nn.Parameter, rank: int) -> None:
    count, *sizes = weight.shape
    wide, out = sizes if module.is_transposed else sizes[::-1]
    down = torch.empty(count, rank, wide, device=weight.device)
    if not weight.is_meta:
        down.uniform_(-1 / math.sqrt(wide), 1 / math.sqrt(wide))
    module.register_parameter(name + LORA_A, nn.Parameter(down))
    module.register_parameter(name + LORA_B, nn.Parameter(torch.zeros(count, out, rank, device=weight.device)))


@cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of adapted experts of a class; one for all of its layers."""
    return type(f"Adapted{kind.__name__}", (AdaptedExperts, kind), {})


@dataclass(frozen=True)
class _Groups:
    """Rows that lie by experts."""

    experts: torch.Tensor
    """int64 ``[N]``: which expert each row is for."""
    counts: torch.Tensor
    """int64 ``[E]``: rows of each expert."""
    is_grouped: bool
    """Whether one grouped product computes all experts."""

    def product(self, rows: torch.Tensor, weight: torch.Tensor, is_transposed: bool = False) -> torch.Tensor:
        """Rows ``[N, in]``, each by its expert's matrix of ``[E, out, in]``, or of ``[E, in, out]``: ``[N, out]``."""
        if self.is_grouped:
            ends = self.counts.cumsum(0, dtype=torch.int32)
            made: torch.Tensor = transformers_private.grouped_linear(rows, weight, ends, is_transposed=is_transposed)
            return made
        parts = zip(rows.to(weight.dtype).split(self.counts.tolist()), weight, strict=True)
        return torch.cat([part @ (one if is_transposed else one.T) for part, one in parts])


def _projected(module: Any, name: str, rows: torch.Tensor, groups: _Groups) -> torch.Tensor:
    """One of the two layers of all experts, with its adapter: rows ``[N, in]`` to ``[N, out]``.

    Grouped products know no autocast: under it those of an adapter are in the type of the weight that it adapts.
    """
    weight: torch.Tensor = getattr(module, name)
    made = groups.product(rows, weight, module.is_transposed)
    if module.has_bias:
        made = made + getattr(module, f"{name}_bias")[groups.experts]
    lora: ExpertsLora = module.lora
    if not lora.is_on:
        return made
    down, up = getattr(module, name + LORA_A), getattr(module, name + LORA_B)
    is_rounded = torch.is_autocast_enabled(rows.device.type)
    dtype = weight.dtype if is_rounded else torch.promote_types(weight.dtype, down.dtype)
    given = functional.dropout(rows, lora.dropout, module.training).to(dtype)
    down, up = _filled(down.to(dtype), up.to(dtype))
    inner = groups.product(given, down)
    if (switch := getattr(module, SWITCH, None)) is not None:
        inner = inner * switch
    added = groups.product(inner, up)
    return torch.add(made, added, alpha=lora.scale).to(made.dtype)


def _filled(down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with zeros for a rank that grouped products take."""
    lacking = -down.shape[1] % (_ALIGNED // down.dtype.itemsize)
    if not lacking:
        return down, up
    return functional.pad(down, (0, 0, 0, lacking)), functional.pad(up, (0, lacking))
