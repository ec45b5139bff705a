"""The reference of the campaign of causal types: a model that transformers alone loads, in a plain loop.

Each document is computed by itself, without tuner's attention. The loss of a step is the cross-entropy of all trained
tokens of its documents, divided by their count; gradients are clipped to a norm of 1 and AdamW takes a step.
Low-rank adapters are s B A, added to the weights where they are read: nothing of peft.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parametrize
from transformers import AutoModelForCausalLM

from tools.causal_rows import STEPS, TRAINED, documents
from tuner.model.attention import withdrawn
from tuner.train.optimizer import group_parameters
from tuner.train.step import _mixed as mixed

SEED = 42
OPTIMIZER: dict[str, Any] = {"betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}
RATE, ADAPTER_RATE = 3e-4, 2e-3
"""Small, and an eps at which rounding moves little: at 1e-3 and 1e-8 the plain loop itself, its weights changed by
1e-7, ends up 1e-4 away in models of linear attention."""
RANK, ALPHA = 4, 8
CLIPPED = 1.0


class LowRank(nn.Module):
    """A weight plus s B A; of a layer that keeps its weight transposed (Conv1D), its transpose."""

    def __init__(self, first: torch.Tensor, rows: int, transposed: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(first.clone())
        self.second = nn.Parameter(torch.zeros(rows, len(first)))
        self.transposed = transposed

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum, of the weight's shape."""
        product = self.second @ self.first * (ALPHA / RANK)
        return weight + (product.T if self.transposed else product)


class PlainLoop:
    """One model in a plain loop: losses of all steps, gradients of the first, logits at the end.

    With ``firsts``, the first matrices of adapters by the name of their layer, those are trained alone. A model that
    draws random numbers in training draws them as `tuner train` does with a document to a forward, or is ``held`` in
    evaluation mode, where documents lie in one forward and would get others.
    """

    def __init__(self, directory: Path, firsts: Mapping[str, torch.Tensor] | None = None, held: bool = False) -> None:
        with withdrawn():
            self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.train(not held)
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self._parameters = dict(self.model.named_parameters()) if firsts is None else self._adapt(firsts)
        rate = RATE if firsts is None else ADAPTER_RATE
        groups = group_parameters(self._parameters, rate, OPTIMIZER["weight_decay"], {})
        chosen = [
            {"params": [self._parameters[name] for name in group["names"]], "weight_decay": group["weight_decay"]}
            for group in groups
        ]
        self._optimizer = torch.optim.AdamW(chosen, lr=rate, betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"])

    def train(self, steps: int = STEPS) -> PlainLoop:
        """Take the steps; the loop itself."""
        with withdrawn():
            for step in range(steps):
                loss = self.loss(step)
                loss.backward()
                self.losses.append(loss.item())
                if step == 0:
                    found = ((name, p.grad) for name, p in self._parameters.items())
                    self.gradients = {name: grad.double().clone() for name, grad in found if grad is not None}
                clip_grad_norm_(self._parameters.values(), CLIPPED)
                self._optimizer.step()
                self._optimizer.zero_grad()
        return self

    def loss(self, step: int) -> torch.Tensor:
        """The loss of a step, in float64."""
        total = torch.zeros((), dtype=torch.float64)
        with _balance(self.model) as balance:
            for number, ids in enumerate(documents(step)):
                torch.manual_seed(mixed(SEED, step, number, 0))
                row = torch.tensor(ids)
                logits = self.model(input_ids=row[None], use_cache=False).logits[0]
                total = total + cross_entropy(logits[:-1].double(), row[1:], reduction="sum") / TRAINED
        return total + balance.loss()

    @torch.no_grad()
    def logits(self) -> list[torch.Tensor]:
        """Of the documents of the first step, as the model is now."""
        self.model.train(False)
        with withdrawn():
            return [self.model(input_ids=ids[None], use_cache=False).logits[0] for ids in self.inputs()]

    def idle(self) -> list[str]:
        """Names of parameters, and of slices of those with a slice for each expert, that no gradient reached."""
        names = []
        for name, parameter in self.model.named_parameters():
            gradient = self.gradients.get(name)
            parts = parameter.shape[0] if parameter.ndim == 3 and "expert" in name else 1
            if gradient is None or any(not part.any() for part in gradient.reshape(parts, -1)):
                names.append(name)
        return names

    @staticmethod
    def inputs() -> list[torch.Tensor]:
        """The documents of the first step."""
        return [torch.tensor(ids) for ids in documents()]

    def _adapt(self, firsts: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        self.model.requires_grad_(False)
        found = {}
        for name, first in firsts.items():
            layer: Any = self.model.get_submodule(name)
            transposed = type(layer).__name__ == "Conv1D"
            rows = layer.weight.shape[1 if transposed else 0]
            added = LowRank(first, rows, transposed)
            parametrize.register_parametrization(layer, "weight", added)
            found |= {f"{name}.lora_A.default.weight": added.first, f"{name}.lora_B.default.weight": added.second}
        return found


class Balance:
    """The loss of a mixture's routers over all documents of a step, as the model's own code has it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []
        self.compute: Any = None
        self.weight = 0.0

    def loss(self) -> torch.Tensor:
        """Its own function of the routers' logits of all documents; 0 for a model without one, or with it off."""
        if not self.calls:
            return torch.zeros(())
        layers = zip(*(gates for gates, _ in self.calls), strict=True)
        together = tuple(torch.cat([gate.reshape(-1, gate.shape[-1]) for gate in layer]) for layer in layers)
        loss: torch.Tensor = self.weight * self.compute(together, *self.calls[0][1])
        return loss.double()


@contextmanager
def _balance(model: Any) -> Iterator[Balance]:
    """Within, what the model's forward would compute of one document's routers is noted, for all of them at once."""
    balance, module, name = Balance(), sys.modules[type(model).__module__], "load_balancing_loss_func"
    balance.compute = getattr(module, name, None)
    if balance.compute is None:
        yield balance
        return
    balance.weight = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", 0.0))

    def note(gates: Any, *others: Any) -> torch.Tensor:
        balance.calls.append((gates, others))
        return torch.zeros(())

    setattr(module, name, note)
    try:
        yield balance
    finally:
        setattr(module, name, balance.compute)


def draws(directory: Path) -> bool:
    """Whether a model draws random numbers in training, whatever its config says of dropout."""
    with withdrawn(), torch.no_grad():
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model.train()
        row = torch.tensor(documents()[1])[None]
        once, *again = (model(input_ids=row, use_cache=False).logits for _ in range(8))
    return not all(torch.equal(once, other) for other in again)  # a draw may come out the same (PhiMoE's mostly does)
