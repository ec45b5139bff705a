"""Products with a quantised weight are those with the dequantised one, a tile at a time, and keep codes alone."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tuner.model import blocks
from tuner.model.quantize import linear
from tuner.model.quantize.codes import Kind, Quantized, dequantize, quantize
from tuner.model.quantize.linear import quantized_linear, tiles

KINDS: tuple[Kind, Kind] = ("nf4", "int8")
BF16, FP32 = torch.bfloat16, torch.float32
SMALL = 4096
"""Bytes of a tile: of some dozen rows or columns of what is multiplied here, and of less than 64 of them."""


def weight(kind: Kind, rows: int, columns: int) -> Quantized:
    return quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / columns**0.5, kind)


def products(made: Quantized, dtype: torch.dtype, native: bool = False) -> list[list[torch.Tensor]]:
    """Result and gradients of input and bias: ours, and those of a plain layer."""
    generator = torch.Generator().manual_seed(0)
    rows = len(made.codes)
    source = torch.randn(2, 9, made.columns, generator=generator).to(dtype)
    bias, upstream = (torch.randn(*shape, rows, generator=generator).to(dtype) for shape in ((), (2, 9)))
    whole = dequantize(made.codes, made.scales, made.columns, dtype)
    found = []
    for ours in (True, False):
        leaves = [source.clone().requires_grad_(), bias.clone().requires_grad_()]
        if ours:
            result = quantized_linear(leaves[0], made.codes, made.scales, leaves[1], native)
        else:
            result = functional.linear(leaves[0], whole, leaves[1])
        found.append([result.detach(), *torch.autograd.grad(result, leaves, upstream)])
    return found


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_tile_is_the_plain_product_bit_for_bit(kind: Kind, dtype: torch.dtype, native: bool) -> None:
    for rows, columns in ((70, 130), (1, 64), (5, 1)):
        ours, plain = products(weight(kind, rows, columns), dtype, native)
        assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_add_nothing_up(kind: Kind, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is one sum of one product, whatever tile it is in: as near to float64 as the plain product's."""
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", SMALL)
    for dtype, allowed in ((FP32, 1e-6), (BF16, 4e-3)):
        made = weight(kind, 300, 200)
        assert len(tiles(300, 200 * dtype.itemsize, "cpu")) > 4
        for one, other in zip(*products(made, dtype, native), strict=True):
            assert one.dtype == dtype
            assert float((one.double() - other.double()).norm() / other.double().norm()) < allowed


def test_tiles_cover_everything_once_at_blocks_and_are_of_bounded_size() -> None:
    for length in (1, 63, 64, 65, 1000, 14336):
        for each in (2, 1000, 1 << 19):
            found = tiles(length, each, "cpu")
            assert found[0][0] == 0 and found[-1][1] == length
            assert all(a[1] == b[0] and b[0] % 64 == 0 for a, b in zip(found, found[1:], strict=False))
            most = max(last - first for first, last in found)
            assert most == found[0][1]
            assert 0 < most * each <= max(linear.TILE_BYTES["cpu"], 64 * each)


def test_autocast_decides_the_type() -> None:
    made = weight("nf4", 40, 100)
    source = torch.randn(3, 100, requires_grad=True)
    with torch.autocast("cpu", dtype=BF16):
        found = quantized_linear(source, made.codes, made.scales, torch.ones(40))
        expected = functional.linear(source, dequantize(made.codes, made.scales, 100, BF16), torch.ones(40))
    assert found.dtype == BF16 and torch.equal(found, expected)
    (grad,) = torch.autograd.grad(found.sum(), source)
    assert grad.dtype == FP32


def test_codes_and_scales_are_all_that_is_kept() -> None:
    made, kept = weight("nf4", 128, 512), list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        quantized_linear(torch.randn(7, 512, requires_grad=True), made.codes, made.scales)
    assert {one.data_ptr() for one in kept} == {made.codes.data_ptr(), made.scales.data_ptr()}


@pytest.mark.parametrize("native", [False, True])
def test_the_same_bits_with_any_number_of_threads_that_make_tiles(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = weight("nf4", 300, 200)
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", SMALL)
    found = []
    for count in (1, 2, 5):
        monkeypatch.setattr("tuner.model.native.library.threads", lambda count=count: count)
        found.append(products(made, BF16, native)[0])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_no_numbers_are_needed_to_predict_it() -> None:
    made = weight("int8", 30, 100)
    with FakeTensorMode(allow_non_fake_inputs=True):
        codes, scales = (torch.empty(one.shape, dtype=one.dtype) for one in (made.codes, made.scales))
        source = torch.empty(2, 5, 100, dtype=BF16, requires_grad=True)
        result = quantized_linear(source, codes, scales)
        assert result.shape == (2, 5, 30) and result.dtype == BF16
        (grad,) = torch.autograd.grad(result.sum(), source)
        assert grad.shape == source.shape and grad.dtype == BF16
    meta = quantized_linear(torch.empty(5, 100, device="meta"), made.codes.to("meta"), made.scales.to("meta"))
    assert meta.shape == (5, 30)


def test_a_compiled_layer_has_one_graph_and_the_plain_gradients() -> None:
    made, down = weight("nf4", 100, 100), torch.randn(100, 4)

    def layer(source: torch.Tensor) -> torch.Tensor:
        return functional.silu(quantized_linear(source, made.codes, made.scales) + source @ down @ down.T)

    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        source = torch.randn(6, 100, generator=torch.Generator().manual_seed(1)).requires_grad_()
        result = run(source)
        found.append([result, *torch.autograd.grad(result.sum(), source)])
    torch._dynamo.reset()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_selective_recomputing_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made, calls, fill = weight("nf4", 64, 64), list[int](), linear.fill

    def counting(*args: Any) -> None:
        calls.append(1)
        fill(*args)

    monkeypatch.setattr(linear, "fill", counting)

    def layer(source: torch.Tensor) -> torch.Tensor:
        return functional.silu(quantized_linear(functional.silu(source), made.codes, made.scales))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(blocks._policy)

    source = torch.randn(6, 64, requires_grad=True)
    expected = torch.autograd.grad(layer(source).sum(), source)
    calls.clear()
    found = checkpoint(layer, source, use_reentrant=False, context_fn=contexts).sum()
    assert torch.equal(torch.autograd.grad(found, source)[0], expected[0])
    assert len(calls) == 2, "one tile forward, one backward: the product is not made again"
