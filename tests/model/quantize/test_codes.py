"""Codes and scales are bitsandbytes' NF4 and LLM.int8, bit for bit, whatever the shape, the cut or the threads, and
by the kernels in C and in Triton.
"""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fixtures.commands import printed
from tests.model.quantize import drawn
from tuner.errors import DataError, RecipeError
from tuner.model.native import library
from tuner.model.quantize import codes as module
from tuner.model.quantize.codes import BLOCK, HUGE, TINY, TYPES, Kind, Quantized, dequantize, quantize
from tuner.model.quantize.layers import QuantizeSpec
from tuner.model.quantize.linear import dequantized

KINDS: tuple[Kind, Kind] = ("nf4", "int8")
FURTHEST = {"nf4": (1 - 0.6961928009986877) / 2 * 1.0001, "int8": 0.5 / 127 * 1.0001}
"""How far a value may lie from the weight, in parts of its block's largest magnitude."""


def back(found: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return dequantize(found.codes, found.scales, found.columns, dtype)


def same(one: Quantized, other: Quantized) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_thousand_blocks_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    found = quantize(drawn.blocks(dtype), "nf4")
    assert same(quantize(drawn.blocks(dtype), "nf4", native=True), found)
    made = [back(found, other) for other in (torch.float32, torch.bfloat16, torch.float16)]
    assert drawn.sha256(found.codes, found.scales, *made) == drawn.MADE_BY_BITSANDBYTES[str(dtype)]


def test_the_nearest_of_the_16_values_and_of_two_the_lower() -> None:
    table = module.nf4_values(torch.device("cpu"))
    middles = (table[:-1].numpy() + table[1:].numpy()) / np.float32(2)
    above = np.nextafter(middles, np.float32(2), dtype=np.float32)
    row = torch.from_numpy(np.concatenate([table.numpy(), middles, above]))[None]
    codes = quantize(row, "nf4").codes
    assert torch.equal(quantize(row, "nf4", native=True).codes, codes)
    expected = [*range(16), *range(15), *range(1, 16)]
    assert [*torch.stack((codes >> 4, codes & 15), -1).flatten().tolist()] == expected


def test_int8_rounds_to_even_parts_of_the_largest_whose_reciprocal_is_rounded() -> None:
    both = torch.tensor([[0.46875, 0.9375]])  # 63.5 parts of 127, but for the rounding
    assert quantize(both, "int8").codes.tolist() == quantize(both, "int8", native=True).codes.tolist() == [[64, 127]]
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -2.5, -127.0, 126.4, -0.4]])
    found = quantize(row, "int8")
    assert same(quantize(row, "int8", native=True), found)
    assert found.codes.tolist() == [[127, 0, 2, 2, -2, -127, 126, 0]] and found.scales.tolist() == [[127.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_c_rounds_each_product_by_itself(kind: Kind) -> None:
    """Among so many numbers are some whose code is another one where a product is added to before it is rounded."""
    weight = drawn.blocks(torch.bfloat16, 4096, 64)
    assert same(quantize(weight, kind, native=True), quantize(weight, kind))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5), columns=st.integers(1, 200), seed=st.integers(0, 2**16), power=st.integers(-140, 120),
    dtype=st.sampled_from(TYPES), kind=st.sampled_from(KINDS),
)  # fmt: skip
def test_values_are_near_in_every_block_of_every_shape(
    rows: int, columns: int, seed: int, power: int, dtype: torch.dtype, kind: Kind
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = ((torch.rand(rows, columns, generator=generator) * 2 - 1).double() * 2.0**power).to(dtype)
    weight = torch.where(weight.isfinite(), weight, 0)
    found = quantize(weight, kind)
    assert found.codes.shape == (rows, module.code_columns(kind, columns))
    assert found.codes.dtype == module.code_type(kind)
    assert found.scales.shape == (rows, module.scale_columns(columns)) and found.scales.dtype == torch.float32
    assert kind == module.kind_of(found.codes)
    assert same(quantize(weight, kind, native=True), found)
    largest = found.scales.repeat_interleave(BLOCK, 1)[:, :columns].double()
    apart = (back(found).double() - weight.double()).abs()
    assert bool((apart <= largest * FURTHEST[kind] + TINY).all())
    for row in range(rows):  # no row, and no column to the left of a block, knows of what comes after it
        assert same(quantize(weight[row : row + 1], kind), Quantized(found.codes[[row]], found.scales[[row]], columns))
    whole = columns // BLOCK * BLOCK
    if whole:
        cut = Quantized(found.codes[:, : module.code_columns(kind, whole)], found.scales[:, : whole // BLOCK], whole)
        assert same(quantize(weight[:, :whole], kind), cut)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_in_slabs_strided_with_threads_and_without_denormals(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = drawn.blocks(torch.float32, 50, 130)
    weight[3] *= 2.0**-120
    weight[5, 7] = 1e-39
    expected, threads = quantize(weight, kind), torch.get_num_threads()
    assert not expected.scales[3].any() and not back(expected)[3].any()
    try:
        for count, flush in ((1, False), (2, False), (1, True)):
            torch.set_num_threads(count)
            torch.set_flush_denormal(flush)
            assert same(quantize(weight, kind), expected) and same(quantize(weight, kind, native=True), expected)
            assert torch.equal(back(quantize(weight, kind)), back(expected))
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    monkeypatch.setattr("tuner.model.quantize.codes._AT_ONCE", 300)
    assert same(quantize(weight.T.contiguous().T, kind), expected)
    rounded = weight.bfloat16()
    assert same(quantize(rounded, kind), quantize(rounded.float(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_and_blocks_of_zeros(kind: Kind) -> None:
    weight = torch.tensor([HUGE, -HUGE, HUGE / 2, 0.0, -0.0]).repeat(2, 1)
    weight[1] = 0.0
    assert same(quantize(weight, kind, native=True), quantize(weight, kind))
    found = back(quantize(weight, kind))
    assert found[0, :2].tolist() == pytest.approx(weight[0, :2].tolist()) and abs(found[0, 2] / HUGE - 0.5) < 0.07
    assert found[1].tolist() == [0.0] * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.4e36])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native", [False, True])
def test_what_has_no_code_is_refused_by_name(
    native: bool, kind: Kind, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.model.quantize.codes._AT_ONCE", 280)
    weight = torch.zeros(9, 70)
    weight[6, 69] = weight[7, 0] = value
    with pytest.raises(
        DataError, match=r"layers\.0\.q_proj\.weight: row 6 holds NaN, infinity or a number above 1.3e36"
    ):
        quantize(weight, kind, "layers.0.q_proj.weight", native)


@pytest.mark.parametrize("weight", [torch.zeros(3), torch.zeros(2, 0), torch.zeros(2, 2, dtype=torch.int32)])
def test_what_is_no_weight_is_refused(weight: torch.Tensor) -> None:
    with pytest.raises(RecipeError, match="q_proj: a .* cannot be quantised to nf4"):
        quantize(weight, "nf4", "q_proj")


def test_the_recipe_of_the_quantiser() -> None:
    assert QuantizeSpec("nf4").facts() == {"kind": "nf4", "block": 64, "scales": "float32", "version": 1}


IN_INTERPRETER = ((3, 2), (17, 65), (2, 191))
SHAPES = ((1, 1), (3, 2), (2, 63), (5, 64), (33, 65), (7, 130), (2, 575))
IN_TRITON = """
import json, sys, torch
from tuner.model.quantize.codes import code_columns, dequantize, quantize
from tuner.model.quantize.triton_rows import fill
device, wrong = sys.argv[1], []
for rows, columns in json.loads(sys.argv[2]):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(device)
    for kind in ("nf4", "int8"):
        made = quantize(weight, kind)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for first in {0, columns // 64 * 64}:
                own = made.codes[:, code_columns(kind, first) :], made.scales[:, first // 64 :], columns - first, dtype
                found = torch.empty(rows, columns - first, dtype=dtype, device=device)
                fill(found, *own[:2])
                if not torch.equal(found, dequantize(*own)):
                    wrong.append([kind, rows, columns, first, str(dtype)])
print(json.dumps(wrong))
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c_gives_the_bits_of_torch(kind: Kind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 3):
        monkeypatch.setattr(library, "threads", lambda count=count: count)
        for rows, columns in SHAPES:
            weight = drawn.blocks(torch.float32, rows, columns)
            made = quantize(weight, kind)
            made.scales[0, 0] = 1.3e-38  # as others may store it: products are denormals
            found = dequantized(made.codes, made.scales, columns, dtype, True)
            assert torch.equal(found, dequantize(made.codes, made.scales, columns, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_of_cut_tensors(kind: Kind) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(3, 1)
    codes = codes if kind == "nf4" else codes.view(torch.int8)
    columns = 512 if kind == "nf4" else 256
    scales = torch.linspace(-1, 3, 3 * columns // 64).view(3, -1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = dequantize(codes, scales, columns, dtype)
        own = slice(64 // (2 if kind == "nf4" else 1), None)
        found = dequantized(codes[1:, own], scales[1:, 1:], columns - 64, dtype, True)
        assert torch.equal(found, expected[1:, 64:])
        turned = dequantized(codes.T.contiguous().T, scales, columns, dtype, True)
        assert torch.equal(turned, expected)


def test_ties_between_bfloat16_numbers_go_to_the_even_one() -> None:
    codes, scales = torch.full((2, 32), 255, dtype=torch.uint8), torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8]])
    for native in (False, True):
        found = dequantized(codes, scales, 64, torch.bfloat16, native)
        assert found.unique(dim=1).tolist() == [[1.0], [1 + 2**-6]]


def test_the_operation_makes_the_weight_and_is_predicted_without_numbers() -> None:
    made = quantize(torch.randn(4, 70), "nf4")
    found = dequantized(made.codes, made.scales, 70, torch.bfloat16, False)
    assert torch.equal(found, dequantize(made.codes, made.scales, 70, torch.bfloat16))
    meta = dequantized(made.codes.to("meta"), made.scales.to("meta"), 70, torch.bfloat16, True)
    assert (meta.shape, meta.dtype, meta.device.type) == (found.shape, found.dtype, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        codes, scales = (torch.empty(one.shape, dtype=one.dtype, device="cuda") for one in (made.codes, made.scales))
        assert dequantized(codes, scales, 70, torch.bfloat16, False).is_cuda


def test_triton_gives_the_bits_of_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert printed(IN_TRITON, "cpu", json.dumps(IN_INTERPRETER), TRITON_INTERPRET="1") == []


@pytest.mark.gpu
def test_triton_gives_the_bits_of_torch_on_a_gpu() -> None:
    assert printed(IN_TRITON, "cuda", json.dumps(SHAPES), fork=False) == []
