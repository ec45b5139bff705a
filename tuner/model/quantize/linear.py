"""A frozen linear layer that holds codes and scales in the place of its weight, which is never there as a whole.

Both are plain parameters that nobody trains: FSDP2 shards them by rows as the bytes that they are, at any world size,
and gathers codes, not weights. The weight that they stand for is made a tile at a time, by the fastest way there is:
in C on the CPU, in Triton on CUDA, with the bits of :func:`tuner.model.quantize.codes.dequantize`.

Forward, a tile is some rows of the weight, and gives as many columns of the result. Backward, it is some columns, and
gives as many columns of the input's gradient. So no number of a result is added up over tiles: each is one sum of a
matrix product, over all that it was a sum of, and is rounded once. What is kept for the backward pass is codes and
scales.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tuner.model.freeze import Content, content_of
from tuner.model.quantize import codes as plain
from tuner.model.quantize.codes import BLOCK, Kind, Quantized, code_columns, kind_of, quantize
from tuner.runtime.device import is_traced, target, triton_problem


@torch.library.custom_op("tuner::dequantized", mutates_args=())
def dequantized(
    codes: torch.Tensor, scales: torch.Tensor, columns: int, dtype: torch.dtype, native: bool
) -> torch.Tensor:
    """The whole weight ``[out, columns]`` in ``dtype``, as one operation, for those who cannot do with tiles.

    ``native`` as for :func:`fill`.
    """
    output = codes.new_empty(codes.shape[0], columns, dtype=dtype)
    fill(output, codes, scales, native)
    return output


dequantized.register_fake(lambda codes, scales, columns, dtype, _: codes.new_empty(len(codes), columns, dtype=dtype))


def fill(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, native: bool = False) -> None:
    """Make the weight ``[out, columns]`` in ``output``, dense; in C on the CPU where ``native``.

    Codes and scales may be cut from larger ones: any rows, and columns from a multiple of 64 on. Raises MachineError
    where the compiled kernel cannot be had.
    """
    codes, scales = _dense_rows(codes), _dense_rows(scales)
    if target(codes) == "cuda" and (is_traced() or _triton_problem() is None):
        launch(output, codes, scales)
    elif native and codes.device.type == "cpu" and output.dtype in plain.TYPES_IN_C:
        plain.decode_in_c(output, codes, scales)
    else:
        output.copy_(plain.dequantize(codes, scales, output.shape[1], output.dtype))


def launch(output: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Run the kernel in Triton; what is traced has no numbers to be made, and may be traced without Triton."""
    if not is_traced():
        from tuner.model.quantize import triton_rows

        triton_rows.fill(output, codes, scales)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, of whose rows the numbers lie one after the other: kernels know no other."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


_triton_problem = cache(triton_problem)


TILE_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
"""How large the tile of a weight is at most, by the kind of device."""


def quantized_linear(
    source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None,
    native: bool = False,
) -> torch.Tensor:
    """``source`` ``[..., columns]`` times the transposed weight ``[out, columns]`` that codes and scales stand for.

    In the type of the source, or of autocast where that is on; the weight's values are rounded to it. Differentiable in
    source and ``bias`` ``[out]``. With ``native`` the CPU makes tiles by the compiled kernel: the same bits, sooner.
    """
    kind = source.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        source, bias = source.to(dtype), None if bias is None else bias.to(dtype)
    result: torch.Tensor = quantized_product(source, codes, scales, bias, native)
    return result


@torch.library.custom_op("tuner::quantized_linear", mutates_args=())
def quantized_product(
    source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, native: bool
) -> torch.Tensor:
    """The operation of :func:`quantized_linear`: in the type of the source."""
    rows, tile = source.reshape(-1, source.shape[-1]), _Tile(source, native)
    result = source.new_empty(len(rows), len(codes))
    for first, last in tiles(len(codes), rows.shape[1] * source.element_size(), target(source)):
        weight, part = tile.of(codes[first:last], scales[first:last], rows.shape[1]).T, result[:, first:last]
        if bias is None:
            torch.mm(rows, weight, out=part)
        else:
            torch.addmm(bias[first:last], rows, weight, out=part)
    return result.view(*source.shape[:-1], len(codes))


quantized_product.register_fake(lambda source, codes, *_: source.new_empty(*source.shape[:-1], len(codes)))


@torch.library.custom_op("tuner::quantized_linear_backward", mutates_args=())
def _backward(
    upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int, native: bool
) -> torch.Tensor:
    """The gradient of the source: ``upstream`` ``[..., out]`` times the weight."""
    rows = upstream.reshape(-1, len(codes))
    result = upstream.new_empty(len(rows), columns)
    gradient_into(result, rows, (codes, scales), native)
    return result.view(*upstream.shape[:-1], columns)


def gradient_into(
    result: torch.Tensor, rows: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor], native: bool = False,
    adds: bool = False,
) -> None:
    """Put ``rows`` ``[T, out]`` times the weight of ``held`` codes and scales into ``result`` ``[T, columns]``.

    Or what is there already and that product (``adds``): each number is a sum that is rounded once more.
    """
    (codes, scales), tile, columns = held, _Tile(rows, native), result.shape[1]
    kind = kind_of(codes)
    for first, last in tiles(columns, len(codes) * rows.element_size(), target(rows)):
        own = codes[:, code_columns(kind, first) : code_columns(kind, last)]
        weight, part = tile.of(own, scales[:, first // BLOCK :], last - first), result[:, first:last]
        if adds:
            part.addmm_(rows, weight)
        else:
            torch.mm(rows, weight, out=part)


_backward.register_fake(lambda upstream, codes, scales, columns, _: upstream.new_empty(*upstream.shape[:-1], columns))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    source, codes, scales, _, ctx.native = inputs
    ctx.columns = source.shape[-1]
    ctx.save_for_backward(codes, scales)


def _differentiate(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    codes, scales = ctx.saved_tensors
    source = _backward(upstream, codes, scales, ctx.columns, ctx.native) if ctx.needs_input_grad[0] else None
    bias = upstream.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
    return source, None, None, bias, None


quantized_product.register_autograd(_differentiate, setup_context=_remember)


class _Tile:
    """The one place in memory in which the tiles of a product are made: fresh memory costs more than they do."""

    def __init__(self, near: torch.Tensor, native: bool) -> None:
        self._numbers, self._native = near.new_empty(0), native

    def of(self, codes: torch.Tensor, scales: torch.Tensor, columns: int) -> torch.Tensor:
        """A tile, there until the next one is made; none is larger than the first."""
        size = len(codes) * columns
        if not self._numbers.numel():
            self._numbers = self._numbers.new_empty(size)
        tile = self._numbers[:size].view(len(codes), columns)
        fill(tile, codes, scales, self._native)
        return tile


def tiles(length: int, bytes_each: int, device: str) -> list[tuple[int, int]]:
    """Where tiles of rows, or of columns, of so many bytes begin and end: at multiples of 64, and of about one size."""
    most = max(1, TILE_BYTES.get(device, TILE_BYTES["cuda"]) // (bytes_each * BLOCK))
    blocks = -(-length // BLOCK)
    count = -(-blocks // most)
    bounds = [BLOCK * -(-blocks * i // count) for i in range(count)]  # the first is the largest
    return [*pairwise((*bounds, length))]


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
    ) -> "QuantizedLinear":
        """The layer with this weight ``[out, in]``, quantised; on the meta device it has no values.

        ``native``: on the CPU by the compiled kernel, which gives the same bits. Raises DataError for a weight that is
        not finite.
        """
        if weight.is_meta:
            return QuantizedLinear(layer, Quantized.empty(weight, kind))
        return QuantizedLinear(layer, quantize(weight, kind, name, native), content_of(weight))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # of nn.Linear it is a parameter
        """The weight ``[out, in]`` that codes and scales stand for, in float32: made each time, for who reads it.

        Rounded to the base's type it would be another weight than that of the product: DoRA's lengths are of this one.
        """
        found: torch.Tensor = dequantized(self.codes, self.scales, self.in_features, torch.float32, self.native)
        return found

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear calls it
        """``[..., out]`` of ``[..., in]``, in the type of the input, or of autocast."""
        return quantized_linear(input, self.codes, self.scales, self.bias, self.native)

    def extra_repr(self) -> str:
        """Sizes, and what the codes are."""
        return f"{super().extra_repr()}, {kind_of(self.codes)}"
