"""The terms by which routers of a mixture are trained, as sums that add up over a global batch: that by which its
class keeps the experts evenly busy, and the z-loss, which keeps logits small.

Of E experts, k of which each token goes to, f is the share of a layer's tokens for which an expert's probability is
among the k largest, and P the mean of its probability; both are means over all tokens and all layers. The term is
``E · sum_e f_e · P_e`` (Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6, for any k), which is k
where the work is even. f has no gradient. A product of two means is no mean of its micro-batches: f has to be known of
the whole global batch before the first backward pass. P adds up.

The numbers are those of transformers' ``load_balancing_loss_func``, which each class feeds with what its routers say.

The z-loss is the mean, over the same tokens and layers, of the square of the logits' log-sum-exp (Zoph et al. 2022,
https://arxiv.org/abs/2202.08906, equation 5).
"""

import inspect
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.vetting import asks_router_logits

_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ("gate_logits", "num_experts", "top_k", "attention_mask")
_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


class RoutingSums(NamedTuple):
    """Sums over tokens and layers, float64: ``[E]`` how often an expert is among the k most probable, ``[E]`` how
    probable it is, with a gradient, and the squares of the log-sum-exp of logits, with one: zero without a z-loss."""

    chosen: torch.Tensor
    probability: torch.Tensor
    squares: torch.Tensor


class RouterLoss:
    """The weights of both terms, the experts E and how many k each token goes to, and the sums of the last forward."""

    def __init__(self, weight: float, experts: int, per_token: int, *, z_weight: float = 0.0) -> None:
        self.weight, self.z_weight, self.experts, self.per_token = weight, z_weight, experts, per_token
        self.layers = 0
        """How many layers have a router, once a forward was."""
        self.sums = self.nothing(torch.device("cpu"))
        """Of the last forward of the model."""

    def begin(self, device: torch.device) -> None:
        """Forget the last forward."""
        self.sums = self.nothing(device)

    def add(self, logits: Sequence[torch.Tensor], counted: torch.Tensor | None) -> None:
        """Add what the routers of all layers, ``[T, E]`` each, say of the tokens that are ``counted``, bool ``[T]``;
        None: all are."""
        chosen, probability, squares = self.sums
        self.layers = len(logits)
        for layer in logits:
            shares = torch.softmax(layer, -1)
            places = shares.topk(self.per_token, -1).indices
            hits = torch.zeros_like(shares, dtype=torch.float64).scatter_(1, places, 1.0)
            if counted is not None:
                hits, shares = hits * counted[:, None], shares * counted[:, None]
            if self.z_weight:
                square = layer.float().logsumexp(-1).square()  # of bf16 logits, as Zoph et al. compute them in float32
                squares = squares + (square if counted is None else square * counted).sum(dtype=torch.float64)
            chosen = chosen + hits.sum(0)
            probability = probability + shares.sum(0, dtype=torch.float64)
        self.sums = RoutingSums(chosen, probability, squares)

    def value(self, chosen: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
        """The term without its weight: ``chosen`` of all tokens that count, and the part of ``probability`` from some
        of them, whose parts add up."""
        seen = self.seen(chosen)
        return self.experts * (chosen / seen * probability).sum() / seen

    def seen(self, chosen: torch.Tensor) -> torch.Tensor:
        """Tokens times layers."""
        return (chosen.sum() / self.per_token).clamp_min(1.0)

    def nothing(self, device: torch.device) -> RoutingSums:
        """The sums of no tokens."""
        zeros = torch.zeros(self.experts, dtype=torch.float64, device=device)
        return RoutingSums(zeros, zeros, zeros.sum())


def router_loss(model: PreTrainedModel, weight: float | None, *, z_weight: float = 0.0) -> RouterLoss | None:
    """The term of this model's class with a ``weight``, or by default as the config has it, and the z-loss; None where
    it has neither.

    Like transformers itself, the config adds the term where ``output_router_logits`` is true. Raises RecipeError for a
    weight that the class gives nothing to weigh, and for a term of another form.
    """
    own: Any = model
    name, kind = model.config.model_type, type(model)
    if weight is None and not (asks_router_logits(model.config) and has_term(kind)):
        weight = 0.0
    if weight == 0 and not z_weight:
        return None
    key = "router_z_loss_coef" if weight == 0 else "router_aux_loss_coef"
    if not has_term(kind):
        what = "such term in its loss" if weight else "loss of its routers, and so gives no logits of theirs"
        raise RecipeError(
            f"model.{key}: {kind.__name__} of transformers has no {what}",
            hint="take it away: this class balances its experts by other means, or not at all",
        )
    given = getattr(sys.modules[kind.__module__], _FUNCTION)
    if tuple(inspect.signature(given).parameters) != _ARGUMENTS:
        raise RecipeError(
            f"model.{key}: the term of a {name} model has a form of its own, which is not computed",
            hint=f"write model.{key}: 0",
        )
    if weight is None:
        weight = float(next(value for key in _WEIGHTS if (value := getattr(own, key, None)) is not None))
    if not weight and not z_weight:
        return None
    return RouterLoss(weight, int(own.num_experts), int(own.num_experts_per_tok), z_weight=z_weight)


def has_term(kind: type) -> bool:
    """Whether a class of transformers adds the term to its loss."""
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]  # every model has one
    return _FUNCTION in forward.__code__.co_names


def unasked_term(config: PretrainedConfig) -> str | None:
    """A sentence on a weight that the config has and the loss has not, since the config does not ask for the term."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = config.get_text_config()
    parts, keys = (text, getattr(text, "ffn_config", None)), (*_WEIGHTS, "moe_loss_weight")
    weights = {key: value for part in parts for key in keys if (value := getattr(part, key, None))}
    if not weights or asks_router_logits(config) or not isinstance(kind, type) or not has_term(kind):
        return None
    key, value = next(iter(weights.items()))
    return (
        f"{key}: {value:g} of the model's config is not part of the loss, as in transformers, since its "
        f"output_router_logits is false; write model.router_aux_loss_coef: {value:g} to keep the experts evenly busy, "
        "or 0 for no such term"
    )
