"""The kernels in C and in Triton make the bits that plain torch makes of codes."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fixtures.commands import printed
from tests.model.quantize import drawn
from tuner.model.native import library
from tuner.model.quantize.codes import Kind, dequantize, quantize
from tuner.model.quantize.linear import dequantized

KINDS: tuple[Kind, Kind] = ("nf4", "int8")
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
