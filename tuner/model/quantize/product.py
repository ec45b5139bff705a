"""Products with a quantised weight, which is never there as a whole: a tile of it at a time.

Forward, a tile is some rows of the weight, and gives as many columns of the result. Backward, it is some columns, and
gives as many columns of the input's gradient. So no number of a result is added up over tiles: each is one sum of a
matrix product, over all that it was a sum of, and is rounded once. What is kept for the backward pass is codes and
scales.
"""

from itertools import pairwise
from typing import Any

import torch

from tuner.model.quantize.codes import BLOCK, code_columns, kind_of
from tuner.model.quantize.rows import fill
from tuner.runtime.device import target

TILE_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
"""How large the tile of a weight is at most, by the kind of device."""


def quantized_linear(
    source: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
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


@quantized_product.register_fake
def _result(source: torch.Tensor, codes: torch.Tensor, *_: Any) -> torch.Tensor:
    return source.new_empty(*source.shape[:-1], codes.shape[0])


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
    result: torch.Tensor,
    rows: torch.Tensor,
    held: tuple[torch.Tensor, torch.Tensor],
    native: bool = False,
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


@_backward.register_fake
def _gradient(upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, columns: int, _: bool) -> torch.Tensor:
    return upstream.new_empty(*upstream.shape[:-1], columns)


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
