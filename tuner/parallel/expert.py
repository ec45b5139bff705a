"""Expert parallelism: each process of a group has some of the experts of a layer, and tokens are sent to them.

Routing stays as the model's class has it: a router on each process chooses K of E experts for each of its T tokens, and
weighs them. Then, around the experts alone (GShard, Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, without its
bound on how many tokens an expert takes: none is dropped):

- *dispatch*: a token's hidden state is sent to the processes that have its experts, once for each expert (all-to-all);
- the class's own forward computes what came in: each row is a token of one expert with the weight 1;
- *combine*: results go back the same way, and are weighed and added up where the token is, in the order in which the
  router named its experts, as transformers does in one process.

Processes of a group compute rows of their own, so the gradient of an expert sums what its tokens of all of them say;
over the groups FSDP2 adds it up (:func:`tuner.parallel.fsdp.shard`). The weights are DTensors, split by experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.experts import routed_experts
from tuner.model.flops import n_experts
from tuner.model.replay import noted
from tuner.model.root import CausalLM
from tuner.model.wrap import Wrapper, wrap
from tuner.parallel.exchange import send, two_way
from tuner.parallel.lookup import gather_parts
from tuner.runtime.parts import local

_KEY = "parallel.expert"
_SPREAD = "tuner_experts"
"""Where the module of a layer's experts keeps how they are spread."""


def spread_experts(root: CausalLM, mesh: DeviceMesh) -> None:
    """Spread the routed experts of a model's layers over the processes of an axis, in place, on the meta device.

    A model of which nothing is trained (a teacher) may have none. Raises RecipeError as :func:`check_spread` does.
    """
    if not _has_experts(root.model) and not any(parameter.requires_grad for parameter in root.parameters()):
        return
    check_spread(root.model, mesh.size())
    for module in routed_experts(root.model).values():
        spread = SpreadExperts(module, mesh.get_group())
        for name, whole in list(module.named_parameters(recurse=False)):
            own = torch.empty(spread.n_own, *whole.shape[1:], dtype=whole.dtype, device="meta")
            placed = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(placed, requires_grad=whole.requires_grad))
        vars(module)[_SPREAD] = spread
        # How many rows come and go is read on the host: compiled layers have this between their programs.
        wrap(module, Wrapper.EXPERTS, torch.compiler.disable(spread.forward))


def check_spread(model: PreTrainedModel, size: int) -> None:
    """Raise RecipeError for a model whose routed experts cannot be spread over so many processes."""
    kind, found = type(model).__name__, routed_experts(model)
    if not found:
        why = "computes its experts by code of its own, and not by transformers' interface of experts"
        raise RecipeError(
            f"{_KEY}: {size}, but {kind} {why if _has_experts(model) else 'has no routed experts'}",
            hint=f"write {_KEY}: 1; parallel.shard: full divides the weights of any model",
        )
    for name, module in found.items():
        if (count := _count(module)) % size:
            divisors = [str(number) for number in range(2, count + 1) if count % number == 0]
            raise RecipeError(
                f"{_KEY}: {size} does not divide the {count} experts of {name}",
                hint=f"write one of {', '.join(divisors)}",
            )
        tensors = [*module.named_parameters(), *module.named_buffers()]
        other = [own for own, tensor in tensors if own.partition(".")[2] or tensor.shape[:1] != (count,)]
        if other:
            raise RecipeError(
                f"{_KEY}: {name} of {kind} has {other[0]}, which is no part of one expert", hint=f"write {_KEY}: 1"
            )


def _has_experts(model: PreTrainedModel) -> bool:
    """Whether a model has routed experts, in whatever form."""
    named = any("experts" in name.rpartition(".")[2] for name, _ in model.named_modules())
    return named or n_experts(model.config.get_text_config()) > 0


def _count(module: nn.Module) -> int:
    return int(cast(int, module.num_experts))


def all_spread(root: nn.Module) -> list[SpreadExperts]:
    """How the experts of a model's modules are spread: of those that have some, and not all of their own."""
    return [vars(module)[_SPREAD] for module in root.modules() if _SPREAD in vars(module)]


@dataclass(frozen=True)
class TokenExchange:
    """Which rows of tokens a process sends in one forward, and which it receives; the same for every use of it."""

    group: dist.ProcessGroup
    order: torch.Tensor
    """int64 ``[T·K]``: the places of all choices ``[T, K]``, one after the other, by the number of the expert."""
    experts: torch.Tensor
    """int64 ``[N]``: which of this process's own experts each row is for that comes in."""
    sent: list[int]
    """Rows for each process of the group."""
    received: list[int]
    """Rows from each."""

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[T·K, D]``, by experts, to the processes that have these: ``[N, D]``. Collective."""
        return send(rows, self.sent, self.received, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[N, D]`` to where they came from: ``[T·K, D]``. Collective."""
        return send(rows, self.received, self.sent, self.group)


class SpreadExperts:
    """The forward of a layer's experts, of which this process has the weights of some."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._kind, self._compute = type(module), cast(Any, module.forward).__func__  # a kernel's, where it has one
        self._n_experts, self._size = _count(module), dist.get_world_size(group)
        self.n_own = self._n_experts // self._size
        """Experts of this process."""
        self.whole: dict[str, torch.Tensor] | None = None
        """The weights of all experts by name, while they are kept here (:meth:`keep_whole`)."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """What the experts make of tokens ``[T, D]``, each of which goes to ``[T, K]`` of them with such weights.

        Collective, and so is its backward pass, on every process of the group: one without a token of its own experts
        computes a row of zeros, so that weights and routers have a gradient everywhere.
        """
        if self.whole is not None:
            return self._computed(self.whole, hidden_states, top_k_index, top_k_weights)
        weights = {name: local(weight) for name, weight in self._module.named_parameters(recurse=False)}
        per_token = top_k_index.shape[-1]
        tokens, choices = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        exchange = noted(lambda: self._agreed(choices))
        rows, experts = _dispatched(tokens, exchange, per_token), exchange.experts
        n_rows = len(experts)
        if n_rows == 0:
            rows, experts = functional.pad(rows, (0, 0, 0, 1)), functional.pad(experts, (0, 1))
        made = self._computed(weights, rows, experts[:, None], rows.new_ones(len(rows), 1))
        returned = _combined(made[:n_rows], exchange, per_token)  # [T, K, D]
        weighed = (returned * top_k_weights.reshape(*choices.shape, 1)).unflatten(0, hidden_states.shape[:-1])
        summed: torch.Tensor = weighed.sum(-2)  # no view, on which FSDP2 could not rely
        return summed.to(hidden_states.dtype)

    @torch.no_grad()
    def _agreed(self, choices: torch.Tensor) -> TokenExchange:
        """What is sent where by the choices ``[T, K]`` of all processes. Collective; waits for the device."""
        chosen = choices.flatten()
        counts = chosen.new_zeros(self._n_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        incoming = torch.empty_like(counts)  # from each process, those for each expert here
        dist.all_to_all_single(incoming, counts, group=self._group)
        sent, received = split_sizes(counts.view(self._size, -1), incoming.view(self._size, -1), len(chosen))
        own = torch.arange(self.n_own, device=chosen.device).repeat(self._size)
        experts = own.repeat_interleave(incoming, output_size=sum(received))
        return TokenExchange(self._group, chosen.argsort(stable=True), experts, sent, received)

    def _computed(self, weights: dict[str, torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
        """What the class's own forward makes of rows, with these weights as those of all experts that there are."""
        module = self._kind.__new__(self._kind)  # a view of the module; nn.Module finds its parameters as attributes
        count = len(next(iter(weights.values())))
        module.__dict__ = {**vars(self._module), "_parameters": {}, "num_experts": count, **weights}
        made: torch.Tensor = self._compute(module, *rows)
        return made

    def keep_whole(self) -> None:
        """Have all experts on each process, which computes alone from here on; no gradients. Collective."""
        self.whole = {name: self._gathered(weight) for name, weight in self._module.named_parameters(recurse=False)}

    @torch.no_grad()
    def _gathered(self, weight: nn.Parameter) -> torch.Tensor:
        own = local(weight).detach().contiguous()
        whole = own.new_empty(self._n_experts, *own.shape[1:])
        gather_parts(whole, own, self._group)
        return whole


def split_sizes(sent: torch.Tensor, received: torch.Tensor, choices: int) -> tuple[list[int], list[int]]:
    """Rows to each process of a group and from each, of counts by process and expert; the one wait of a layer.

    As many are sent in all as this process has ``choices``: tokens times the experts of each.
    """
    both = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return both[0], both[1]


def _to_experts(tokens: torch.Tensor, exchange: TokenExchange, per_token: int) -> torch.Tensor:
    return exchange.there(tokens[exchange.order // per_token])


def _sums_of_tokens(upstream: torch.Tensor, exchange: TokenExchange, per_token: int) -> torch.Tensor:
    return _to_tokens(upstream, exchange, per_token).sum(1)


def _to_tokens(rows: torch.Tensor, exchange: TokenExchange, per_token: int) -> torch.Tensor:
    """Rows ``[N, D]``, which go back, as the router named these: ``[T, K, D]``."""
    returned = exchange.back(rows)
    placed = torch.empty_like(returned)
    placed[exchange.order] = returned
    return placed.view(-1, per_token, rows.shape[1])


_dispatched = two_way(_to_experts, _sums_of_tokens)
"""Tokens ``[T, D]`` as rows ``[N, D]`` where their experts are. A token's gradient is the sum over its rows."""
_combined = two_way(_to_tokens, lambda chosen, exchange, _: exchange.there(chosen.flatten(0, 1)[exchange.order]))
"""Rows ``[N, D]`` back where their tokens are: ``[T, K, D]``."""
