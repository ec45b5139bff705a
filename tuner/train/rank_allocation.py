"""AdaLoRA's ranks, allocated from step to step by how much each matters to the loss, and its regularisation term.

Zhang et al. 2023 (https://arxiv.org/abs/2303.10512), computed as peft's ``RankAllocator`` and ``AdaLoraModel`` do:
after each update, by the gradients that made it, before they are clipped.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft.tuners.adalora.layer import RankAllocator
from torch import nn

from tuner.data.batches import Batch
from tuner.errors import RecipeError
from tuner.model.adapter import ADAPTER
from tuner.train.methods.method import Counts, Sum, Terms
from tuner.train.step_parts import StepForwards, StepPart

TERM = "adalora_orthogonal"
_PER = "adalora_steps"
_STATE = "adalora"


class RankAllocation(StepPart):
    """Importance of each number of AdaLoRA's matrices, smoothed over steps, and which ranks are left.

    An update that is left out counts for nothing; the host waits to learn of it. Raises RecipeError for several
    processes, whose parts of a matrix do not say what all of it matters.
    """

    def __init__(self, model: nn.Module, processes: int) -> None:
        if processes > 1:
            raise RecipeError("adapter.config.peft_type: ADALORA allocates ranks by whole gradients, in one process")
        config: Any = getattr(model, "peft_config", {})[ADAPTER]
        self._config, self._model = config, model
        self._weight, self._last = config.orth_reg_weight, config.total_step - config.tfinal
        self._parameters = {name: p for name, p in model.named_parameters() if ".lora_" in name and p.requires_grad}
        self._allocator: Any = RankAllocator(model, config, ADAPTER)
        self._gradients: dict[str, torch.Tensor] = {}
        self._parts = 1
        for kept in (self._allocator.ipt, self._allocator.exp_avg_ipt, self._allocator.exp_avg_unc):
            kept.update({name: torch.zeros_like(one.data) for name, one in self._parameters.items()})
        self._left = {
            name: torch.ones(len(one), dtype=torch.uint8, device=one.device) for name, one in self._parameters.items()
            if ".lora_E." in name
        }
        self._step = torch.zeros((), dtype=torch.int64)

    def counts(self, counts: Counts) -> Counts:
        """With the one step that the term is divided by."""
        return {**counts, _PER: 1.0}

    def before_forward(self, step: StepForwards) -> None:
        """The term is spread over the step's micro-batches."""
        self._parts = len(step.batches.micro)

    def terms(self, batch: Batch, terms: Terms) -> Terms:
        """With how far the matrices are from orthogonal ones, the mean over them of a Frobenius norm."""
        matrices = {name: one for name, one in self._parameters.items() if ".lora_E." not in name}
        products = [one @ one.T if ".lora_A." in name else one.T @ one for name, one in matrices.items()]
        norms = [torch.norm(each - torch.eye(len(each), device=each.device), p="fro") for each in products]
        value = self._weight * torch.stack(norms).mean() / self._parts
        return Terms({**terms.losses, TERM: Sum(value, _PER)}, terms.figures)

    def after_backward(self) -> None:
        """Keep the gradients, which are gone when the update is known."""
        self._gradients = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}

    @torch.no_grad()
    def after_update(self, skip: torch.Tensor) -> None:
        """Smooth the importance of each number, and put out the ranks beyond this step's budget."""
        gradients, self._gradients = self._gradients, {}
        if bool(skip):
            return
        step, found = int(self._step), None
        for name, one in self._parameters.items():
            one.grad = gradients[name]
        if step <= self._last:
            _, found = self._allocator.update_and_allocate(self._model, step, force_mask=step == self._last)
        else:
            self._allocator.mask_using_rank_pattern(self._model, {n: one.tolist() for n, one in self._left.items()})
        for name, left in (found or {}).items():
            self._left[name].copy_(torch.tensor(left, dtype=torch.uint8))
        for one in self._parameters.values():
            one.grad = None
        self._step += 1

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Smoothed importance and its uncertainty, ranks that are left, and the number of updates."""
        allocator = self._allocator
        kinds = {"importance": allocator.exp_avg_ipt, "uncertainty": allocator.exp_avg_unc, "left": self._left}
        found = {f"{_STATE}/{kind}/{name}": one for kind, kept in kinds.items() for name, one in kept.items()}
        return {**found, f"{_STATE}/step": self._step}
