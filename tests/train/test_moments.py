"""Numbers in 8 bits: how far each may be off, what is exact, and that no block reaches beyond its row; zeros that
take no memory before the first write.
"""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from tuner.train.moments import BLOCK, SMALL, CodeMap, code_map, decode, encode, rows_of, scales_shape, zeros_like

CPU = torch.device("cpu")
MAPS = {"signed": code_map(True, CPU), "unsigned": code_map(False, CPU)}


def drawn(rows: int, width: int, seed: int, signed: bool) -> torch.Tensor:
    """Numbers of very different sizes, some of them zeros and subnormal ones."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, width, generator=generator) * 10 ** (
        torch.rand(rows, width, generator=generator) * 60 - 45
    )
    numbers[torch.rand(rows, width, generator=generator) < 0.1] = 0.0
    return numbers if signed else numbers.abs()


def test_the_maps_are_those_of_the_paper() -> None:
    """A bit for the sign, then a decade for each zero, and what bits are left divide it evenly (section 1.3)."""
    for codes, decades in ((MAPS["signed"], 7), (MAPS["unsigned"], 7)):
        values = codes.values.tolist()
        assert len(set(values)) == 256 and values == sorted(values)
        assert values[-1] == 1.0 and values[codes.zero] == 0.0
        for decade in range(decades):
            within = [v for v in values if 10.0 ** (decade - 7) <= v < 10.0 ** (decade - 6)]
            assert len(within) == 2 ** (decade + (not codes.signed))
            assert math.isclose(sum(within) / len(within), 0.55 * 10.0 ** (decade - 6), rel_tol=1e-6)
    signed = MAPS["signed"].values.tolist()
    assert [-v for v in signed[126::-1]] == signed[128:255]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 3), width=st.integers(1, 600), seed=st.integers(0, 2**31), signed=st.booleans())
def test_each_number_becomes_the_nearest_value(rows: int, width: int, seed: int, signed: bool) -> None:
    codes = MAPS["signed" if signed else "unsigned"]
    numbers = drawn(rows, width, seed, signed)
    coded, scales = encode(numbers, codes)
    assert (coded.dtype, scales.dtype) == (torch.uint8, torch.float32)
    assert scales.shape == scales_shape(numbers.shape) == (rows, -(-width // BLOCK))
    found = decode(coded, scales, codes)
    for block in range(scales.shape[1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        own, there = numbers[:, columns], found[:, columns]
        largest = own.abs().amax(dim=1)
        assert torch.equal(scales[:, block], largest)
        shares = own.double() / largest.double().where(largest > 0, 1.0)[:, None]
        far = (shares[..., None] - codes.values.double()).abs()
        nearest = far.amin(dim=-1)
        taken = (shares - codes.values.double()[coded[:, columns].int()]).abs()
        kept = own != 0 if signed else own * 0 == 1  # of numbers that are not negative, none but zero becomes zero
        small = ~kept & (own != 0) & (coded[:, columns] == 1)
        assert bool(((taken <= nearest * (1 + 1e-6) + 1e-12) | small).all())
        assert bool((there[own == 0] == 0).all())


def test_small_second_moments_never_become_zero() -> None:
    numbers = torch.tensor([[1.0, 1e-8, 1e-30, 1e-45, 0.0, -0.0]])
    coded, scales = encode(numbers, MAPS["unsigned"])
    assert (coded == 0).tolist() == [[False, False, False, False, True, True]]
    assert bool((decode(coded, scales, MAPS["unsigned"])[0, :4] > 0).all())


@pytest.mark.parametrize("codes", MAPS.values(), ids=MAPS)
def test_zeros_and_subnormal_blocks_are_kept(codes: CodeMap) -> None:
    for number in (0.0, -0.0):
        coded, scales = encode(torch.full((2, 300), number), codes)
        assert bool((coded == codes.zero).all()) and not scales.any()
        assert bool((decode(coded, scales, codes).view(torch.int32) == 0).all()), "the zero of no sign"
    tiny = torch.tensor([[1e-45, 7e-45, 1e-40, 0.0]])
    coded, scales = encode(tiny, codes)
    assert decode(coded, scales, codes)[0, 2] == tiny[0, 2]
    assert coded[0, 3] == codes.zero


@pytest.mark.parametrize("codes", MAPS.values(), ids=MAPS)
def test_what_was_decoded_is_encoded_as_it_was(codes: CodeMap) -> None:
    """A row that sees no gradient only loses scale: its codes stay for good."""
    numbers = torch.rand(4, 700, generator=torch.Generator().manual_seed(1))
    coded, scales = encode(numbers, codes)
    now = decode(coded, scales, codes)
    for _ in range(50):
        now = now * 0.95
        again, less = encode(now, codes)
        assert torch.equal(again, coded)
        now = decode(again, less, codes)


def test_rows_know_nothing_of_each_other() -> None:
    numbers = drawn(9, 300, 3, signed=True) * torch.logspace(-6, 6, 9)[:, None]
    whole, scales = encode(numbers, MAPS["signed"])
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        part, own = encode(numbers[start:stop], MAPS["signed"])
        assert torch.equal(part, whole[start:stop]) and torch.equal(own, scales[start:stop])
        assert torch.equal(decode(part, own, MAPS["signed"]), decode(whole, scales, MAPS["signed"])[start:stop])


def test_what_is_no_number_shows_in_its_block_alone() -> None:
    numbers = torch.ones(2, 512)
    numbers[0, 3], numbers[1, 300] = math.nan, math.inf
    for codes in MAPS.values():
        found = decode(*encode(numbers, codes), codes)
        assert [bool(found[row, at : at + BLOCK].isfinite().all()) for row in (0, 1) for at in (0, BLOCK)] == [
            False, True, True, False,
        ]  # fmt: skip


def test_rows_are_what_the_first_dimension_counts() -> None:
    assert rows_of((5, 4, 3)) == (5, 12)
    assert scales_shape((5, 40, 30)) == (5, 5)
    assert rows_of((7,)) == (7, 1)
    assert rows_of(()) == (1, 1)


def resident() -> int:
    """Bytes of anonymous memory that this process holds."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (SMALL, 2), (64, SMALL // 32, 3)])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_zeros_are_torch_s_own(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    found, expected = zeros_like(parameter, dtype), torch.zeros_like(parameter, dtype=dtype)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert not found.requires_grad
    assert torch.equal(found, expected)
    assert torch.equal(found.add_(1), expected.add_(1))


def test_strides_of_its_own_are_kept_and_fake_tensors_stay_fake() -> None:
    assert zeros_like(torch.ones(512, 1024).T).stride() == (1, 1024)
    with FakeTensorMode():
        parameter = torch.ones(512, 1024)
        assert type(zeros_like(parameter)) is type(parameter)


def test_zeros_take_memory_when_they_are_written() -> None:
    parameter = torch.ones(1 << 24)
    before = resident()
    found = zeros_like(parameter)
    assert resident() - before < 1 << 20
    found.add_(1)
    assert resident() - before > 60 << 20
