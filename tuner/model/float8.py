"""Linear layers of the decoder whose products are made in fp8: rounded to e4m3, with a scale for each row and column.

The three products of a layer (its output, and the gradients of its input and of its weight) each round both of their
matrices along the dimension that is summed over, where a scale can be taken out of the sum: the rowwise recipe of
torchao's float8 training (https://github.com/pytorch/ao, ``torchao/float8``), whose scales are powers of two, so that
scaling itself rounds nothing. Products are summed in float32 and rounded to bf16. Weights stay as they are trained, and
are rounded to bf16 first, as autocast would: what processes gather is the same. Everything else computes in bf16 under
autocast, and so does the layer itself where autocast is off.

Not embeddings, the output layer and norms, which are no linear layers of the decoder; not routers, whose choices jump;
not experts that are one stack of matrices; and not what the kernels cannot take.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.adaptable import READ, not_adaptable
from tuner.model.build import decoder_blocks
from tuner.model.freeze import select
from tuner.model.wrap import Wrapper, wrap
from tuner.runtime.torch_private import scaled_product

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SIDES = 16
"""What rows and columns of the matrices are a multiple of: the kernels of GPUs take no others."""
_EXPONENT = 0x7F800000
"""The bits of a float32 that say which power of two it is."""
_LEAST = 1e-30
"""What the largest number of a row counts as at least: one of zeros alone stays so."""
_ROUTERS = ("gate", "router", "switch", "wg")
_ROUTER, _SMALL = "routers", f"sides that are no multiples of {SIDES}"


@dataclass(frozen=True)
class Float8Layers:
    """The linear layers of a decoder, by name: those whose products are fp8, and why others stay in bf16."""

    rounded: Mapping[str, nn.Linear]
    left: Mapping[str, str]

    @staticmethod
    def of(model: PreTrainedModel, besides: Sequence[str] = ()) -> "Float8Layers":
        """Those of a model, which need no values; names or globs ``besides`` mean layers that stay in bf16, too.

        Raises RecipeError where none can be, and for a glob that means none.
        """
        blocks = {id(part) for block in decoder_blocks(model, "train.precision: fp8") for part in block.modules()}
        linear = {n: m for n, m in model.named_modules() if id(m) in blocks and type(m) is nn.Linear}
        read = {name for name, why in not_adaptable(model, linear).items() if why == READ}
        left = dict.fromkeys(select(besides, linear, "train.fp8_except"), "train.fp8_except")
        for name, layer in linear.items():
            if any(part in _ROUTERS for part in name.split(".")):
                left[name] = _ROUTER
            elif layer.in_features % SIDES or layer.out_features % SIDES:
                left[name] = _SMALL
            elif name in read:
                left[name] = "the model's code reads their weights without a call"
        rounded = {name: layer for name, layer in linear.items() if name not in left}
        if not rounded:
            why = "; ".join(dict.fromkeys(left.values())) or "its decoder has no torch.nn.Linear"
            raise RecipeError(
                f"train.precision: fp8: no layer of {type(model).__name__} can be computed in it: {why}",
                hint="write precision: bf16",
            )
        return Float8Layers(rounded, left)

    def described(self) -> str:
        """How many there are of either kind, in words."""
        count, whole = len(self.rounded), len(self.rounded) + len(self.left)
        why = ", ".join(f"{n} of {reason}" for reason, n in Counter(self.left.values()).items())
        rest = f"; the others in bf16: {why}" if self.left else ""
        return f"products of {count} of the decoder's {whole} linear layers{rest}"


def apply_float8(model: PreTrainedModel, besides: Sequence[str] = ()) -> None:
    """Have the model's linear layers, but those ``besides``, multiply in fp8 under autocast, in place; before it gets
    an adapter."""
    for layer in Float8Layers.of(model, besides).rounded.values():
        wrap(layer, Wrapper.FLOAT8, MethodType(_forward, layer))  # bound: a copy has its own weight


def _forward(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    device = rows.device.type
    if not torch.is_autocast_enabled(device):
        return functional.linear(rows, layer.weight, layer.bias)
    dtype = torch.get_autocast_dtype(device)
    flat = rows.reshape(-1, rows.shape[-1]).to(dtype)
    products: torch.Tensor = _Products.apply(flat, layer.weight)  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        products = products + layer.bias.to(dtype)
    return products.view(*rows.shape[:-1], -1)


class _Products(torch.autograd.Function):
    """Rows ``[M, K]`` of autocast's type, and a weight ``[N, K]`` of any, to ``[M, N]`` in that of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The weight is kept as it is trained, and no copy of it: it is rounded once more to go backward.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        return product(rows, weight.to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = None
        if ctx.needs_input_grad[0]:
            of_rows = product(upstream, weight.to(upstream.dtype).T)
        if ctx.needs_input_grad[1]:
            of_weight = product(_filled(upstream).T, _filled(rows).T).to(weight.dtype)
        return of_rows, of_weight


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left [M, K] @ right.T [K, N]`` of matrices rounded to fp8, each row of either with a scale, in their type.

    On a GPU K and N are multiples of :data:`SIDES`.
    """
    one, other = rounded(left), rounded(right)
    return scaled_product(one.codes, other.codes.T, one.scale, other.scale.T, left.dtype)


class Rounded(NamedTuple):
    """A matrix in fp8: codes e4m3 ``[M, K]``, row by row in memory, and what each row is multiplied by, ``[M, 1]``."""

    codes: torch.Tensor
    scale: torch.Tensor


def rounded(matrix: torch.Tensor) -> Rounded:
    """A matrix ``[M, K]`` with rows scaled by powers of two to just below the largest number of e4m3.

    Numbers that are not finite stay so, with their whole row.
    """
    peak = torch.linalg.vector_norm(matrix, torch.inf, -1, keepdim=True, dtype=torch.float32).clamp_min_(_LEAST)
    factor = (LARGEST / peak).view(torch.int32).bitwise_and_(_EXPONENT).view(torch.float32)
    return Rounded((matrix * factor.to(matrix.dtype)).to(E4M3).contiguous(), factor.reciprocal())


def _filled(rows: torch.Tensor) -> torch.Tensor:
    """Rows ``[M, K]`` with zeros up to a multiple of :data:`SIDES`, where they are what a product sums over."""
    return functional.pad(rows, (0, 0, 0, -len(rows) % SIDES))
