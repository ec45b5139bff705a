"""A frozen linear layer that holds codes and scales in the place of its weight.

Both are plain parameters that nobody trains: FSDP2 shards them by rows as the bytes that they are, at any world size,
and gathers codes, not weights. Nothing of the weight that they stand for outlives a product.
"""

from __future__ import annotations

import torch
from torch import nn

from tuner.model.freeze import Content, content_of
from tuner.model.quantize.codes import Kind, Quantized, code_columns, code_type, kind_of, quantize, scale_columns
from tuner.model.quantize.product import quantized_linear
from tuner.model.quantize.rows import dequantized


class QuantizedLinear(nn.Linear):
    """What an `nn.Linear` computes with the weight ``[out, in]`` that ``codes`` and ``scales`` stand for.

    A subclass, so that peft adapts it as it does others. ``bias`` is the layer's own. ``dtype`` is the type that the
    weight had: that of :attr:`weight`.
    """

    def __init__(self, layer: nn.Linear, held: Quantized, unquantized: Content | None = None) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which makes a weight
        self.in_features, self.out_features = held.columns, held.codes.shape[0]
        self.codes = nn.Parameter(held.codes, requires_grad=False)
        self.scales = nn.Parameter(held.scales, requires_grad=False)
        self.bias = layer.bias
        self.dtype: torch.dtype = layer.weight.dtype
        self.unquantized = unquantized
        """Type, shape and SHA-256 of the weight that was quantised; None where that was never there."""
        self.native = False
        """Whether the CPU turns codes into numbers by the compiled kernel: the same bits, sooner."""
        self.train(layer.training)

    @staticmethod
    def of(
        layer: nn.Linear, weight: torch.Tensor, kind: Kind, name: str = "weight", native: bool = False
    ) -> QuantizedLinear:
        """The layer with this weight ``[out, in]``, quantised; on the meta device it has no values.

        ``native``: on the CPU by the compiled kernel, which gives the same bits. Raises DataError for a weight that is
        not finite.
        """
        if weight.is_meta:
            return QuantizedLinear(layer, _without_values(weight.shape[0], weight.shape[1], kind))
        return QuantizedLinear(layer, quantize(weight, kind, name, native), content_of(weight))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # of nn.Linear it is a parameter
        """The weight ``[out, in]`` that codes and scales stand for, in float32: made each time, for who reads it.

        Rounded to the base's type it would be another weight than that of the product: DoRA's lengths are of this one.
        """
        return self.dequantized(torch.float32)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The same, computed in float32 and rounded to ``dtype``."""
        found: torch.Tensor = dequantized(self.codes, self.scales, self.in_features, dtype, self.native)
        return found

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear calls it
        """``[..., out]`` of ``[..., in]``, in the type of the input, or of autocast."""
        return quantized_linear(input, self.codes, self.scales, self.bias, self.native)

    def extra_repr(self) -> str:
        """Sizes, and what the codes are."""
        return f"{super().extra_repr()}, {kind_of(self.codes)}"


def _without_values(rows: int, columns: int, kind: Kind) -> Quantized:
    """Codes and scales of a weight of this shape on the meta device."""
    codes = torch.empty(rows, code_columns(kind, columns), dtype=code_type(kind), device="meta")
    return Quantized(codes, torch.empty(rows, scale_columns(columns), device="meta", dtype=torch.float32), columns)
