"""Adapters of split layers: each product of LoRA is split as its layer is, and DoRA's lengths are those of whole rows.

Of a layer of which a process has some outputs, B ``[out, r]`` lies as the weight does, and A ``[r, in]`` is whole: the
gradient of ``A x``, r numbers a token, is what is added up. Of one that takes some inputs, A lies as the weight does,
and ``A x`` is what is added up. Where the layer's outputs or inputs are whole everywhere, so is its adapter.
"""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tuner.model.adaptable import added_in_product, takes_product
from tuner.model.adapter import ADAPTER
from tuner.model.wrap import Wrapper, wrap
from tuner.parallel.tensor.collectives import Group, entered
from tuner.parallel.tensor.layers import Columns, OwnDropout, Rows, local, own_weight
from tuner.parallel.tensor.plan import SplitWay


def split_adapter(layer: Any, way: SplitWay, group: Group) -> None:
    """Have an adapted layer of peft's, whose base computes in one of the ways, add its adapter so, in place."""
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if way == "columns":
        wrap(up, Wrapper.SPLIT, Columns(up, lambda given: entered(given, group)))
        if takes_product(layer, ADAPTER):
            wrap(layer, Wrapper.SPLIT, MethodType(_columns_forward, layer))
    elif way == "rows":
        wrap(down, Wrapper.SPLIT, Rows(down, group))
        if not isinstance(dropout := layer.lora_dropout[ADAPTER], nn.Identity):
            layer.lora_dropout[ADAPTER] = OwnDropout(dropout.p, group)
    if layer.lora_magnitude_vector:
        vector = layer.lora_magnitude_vector[ADAPTER]
        wrap(vector, Wrapper.SPLIT, Lengths(vector, way, group))


def split_parameters(layer: Any, way: SplitWay) -> dict[nn.Parameter, int]:
    """Along which dim the parameters of a layer's adapter are split, of those that are."""
    if way == "rows":
        return {layer.lora_A[ADAPTER].weight: 1}
    if way != "columns":
        return {}
    vectors = layer.lora_magnitude_vector
    lengths = [vectors[ADAPTER].weight] if vectors else []
    return dict.fromkeys([layer.lora_B[ADAPTER].weight, *lengths], 0)


def _columns_forward(layer: Any, source: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As :func:`tuner.model.adaptable.add_in_product` has it, with this process's rows of B."""

    def own_rows(up: Any, inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return up.forward.enter(inner), own_weight(up)

    return added_in_product(layer, own_rows, source, *args, **options)


class Lengths:
    """The forward of DoRA's part of a split layer, with peft's arguments: the lengths are those of whole rows."""

    def __init__(self, vector: nn.Module, way: SplitWay, group: Group) -> None:
        self._vector, self._way, self._group = vector, way, group

    def __call__(  # noqa: PLR0913 - peft's
        self,
        x: torch.Tensor,
        *,
        lora_A: Any,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: torch.Tensor | None = None,
        adapter_name: str = ADAPTER,
    ) -> torch.Tensor:
        """What is added to the base's result, as in peft's ``DoraLinearLayer``: m / |W + s·B·A| of both products."""
        factor = own_weight(self._vector) / self._lengths(base_layer, lora_A, lora_B, scaling, x.dtype)
        base: torch.Tensor = base_layer(x) if base_result is None else base_result
        if (bias := local(base_layer.bias)) is not None:
            base = base - bias
        added: torch.Tensor = lora_B(lora_A(x)) * scaling
        return (factor - 1) * base + factor * added

    @torch.no_grad()
    def _lengths(self, base: Any, down: Any, up: Any, scaling: float, dtype: torch.dtype) -> torch.Tensor:
        """Lengths of the rows that this process hands on: all of them, or where it has some outputs, its own."""
        weight, a, b = own_weight(base).to(dtype), own_weight(down), own_weight(up)
        size, rank = self._group.size(), self._group.rank()
        if self._way == "rows_of_own":
            a = a.chunk(size, 1)[rank]
        if self._way == "columns_gathered":
            b = b.chunk(size)[rank]
        whole = weight + scaling * (b @ a).to(dtype)
        if self._way == "columns":
            lengths: torch.Tensor = torch.linalg.vector_norm(whole, dim=1)
            return lengths
        squares = whole.square().sum(1)
        if self._way == "columns_gathered":
            every = squares.new_zeros(size, len(squares))
            every[rank] = squares
            squares = every.flatten()
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()
