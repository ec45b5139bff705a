"""What kernels allocate otherwise than torch's fake ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from tests.fixtures.predict_cases import BF16, Case
from tests.fixtures.predict_counted import resolved_case
from tuner.profile import allocations
from tuner.profile.allocations import grouped_product, keeps_number, scratch_bytes
from tuner.profile.tracing import cuda_stand_in, trace_step

assert varlen is not None  # imported for the operations that it registers
MM = torch.ops.aten.mm.default


def test_a_grouped_product_has_the_shape_and_strides_of_torchs_own() -> None:
    rows, experts = torch.ones(8, 16), torch.ones(2, 16, 12)
    offs = torch.tensor([3, 8], dtype=torch.int32)
    for first, second, given in ((rows, experts, offs), (rows.T, torch.ones(8, 12), offs)):
        real, made = torch.ops.aten._grouped_mm(first, second, given), grouped_product(first, second, given)
        assert (real.shape, real.stride(), real.dtype) == (made.shape, made.stride(), made.dtype)


def test_scratch_space_is_asked_of_the_kernel_for_bf16_on_a_cpu_alone() -> None:
    half = torch.ones(32, 48, dtype=torch.bfloat16), torch.ones(48, 64, dtype=torch.bfloat16)
    assert scratch_bytes(MM, tuple(tensor.float() for tensor in half), "cpu") == 0
    assert scratch_bytes(MM, half, "cuda") == scratch_bytes(torch.ops.aten.mul.Tensor, half, "cpu") == 0
    found = scratch_bytes(MM, half, "cpu")
    assert found == scratch_bytes(MM, half, "cpu") >= 0


BLOCKS, RESULT = 3 << 20, 4  # bytes of scratch space whatever the sides, and bytes a number of the result


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (lambda rows, columns: 0, 0),
        (lambda rows, columns: BLOCKS, BLOCKS),
        (lambda rows, columns: rows * columns * RESULT + 128, (1 << 40) * RESULT + 128),
    ],
    ids=["none", "blocks of the matrices", "the result in float32"],
)
def test_scratch_space_of_longer_products_follows_the_rule_of_the_processor(
    rule: Callable[[int, int], int], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each processor oneDNN has a rule of its own; the three that are known are given in place of the kernel."""
    monkeypatch.setattr(allocations, "_asked", lambda func, layouts: rule(layouts[0][0][0], layouts[1][0][1]))
    wide = torch.empty(1 << 20, 8, dtype=torch.bfloat16, device="meta")
    assert scratch_bytes(MM, (wide, wide.T), "cpu") == wanted


def test_a_product_too_long_to_be_asked_for_has_the_scratch_space_of_a_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the processor that is here, whichever rule it follows."""
    first, second = torch.empty(2048, 64, dtype=torch.bfloat16), torch.empty(64, 2048, dtype=torch.bfloat16)
    real = scratch_bytes(MM, (first, second), "cpu")
    monkeypatch.setattr(allocations, "_LONGEST", (512, 256, 128))
    monkeypatch.setattr(allocations, "_ASKED", 1 << 24)
    assert scratch_bytes(MM, (first, second), "cpu") == pytest.approx(real, abs=1 << 20)


def test_products_that_are_asked_for_are_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(func: Any, layouts: Any) -> int:
        asked.append(layouts)
        return 0

    monkeypatch.setattr(allocations, "_asked", ask)
    for columns, side in ((8, 8192), (1 << 14, 2048)):
        large = torch.empty(1 << 20, columns, dtype=torch.bfloat16, device="meta")
        assert scratch_bytes(MM, (large, large.T), "cpu") == 0
        (first, _), (second, _) = asked.pop()
        assert (first, second) == ((side, min(side, columns)), (min(side, columns), side))
        assert side * min(side, columns) * side <= allocations._ASKED


def test_gloo_gathers_into_a_buffer_of_its_own_and_reduces_a_copy() -> None:
    whole, part = torch.empty(12), torch.empty(6)
    gather, reduce = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default
    assert scratch_bytes(gather, (whole, part), "cpu") == scratch_bytes(reduce, (part, whole), "cpu") == 48
    assert scratch_bytes(gather, (whole, part), "cuda") == 0


def test_numbers_of_a_lesser_type_are_converted_first_on_a_cpu() -> None:
    add, one, half = torch.ops.aten.add_.Tensor, torch.ones(3, 4), torch.ones(4, dtype=torch.bfloat16)
    assert scratch_bytes(add, (one, half), "cpu") == 16 and scratch_bytes(add, (one, half), "cuda") == 0
    assert scratch_bytes(add, (half, one[0]), "cpu") == 16
    assert scratch_bytes(add, (one, one), "cpu") == scratch_bytes(add, (half, torch.tensor(2.0)), "cpu") == 0


@pytest.mark.parametrize(("trained", "number", "kept"), [(True, 2.0, True), (False, 2.0, False), (True, None, False)])
def test_numbers_are_kept_for_the_backward_pass(trained: bool, number: float | None, kept: bool) -> None:
    tensor = torch.ones(2, requires_grad=trained)
    assert keeps_number(torch.ops.aten.mul.Tensor, (tensor, torch.ones(2) if number is None else number)) is kept
    with torch.no_grad():
        assert not keeps_number(torch.ops.aten.mul.Tensor, (tensor, 2.0))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "deterministic", "expected"),
    [
        (4, 4, 64, False, 4 * (10 + 3 * 128) * 4 * (64 + 1)),
        (4, 2, 64, False, 4 * (10 + 3 * 128) * 4 * (64 + 1) + 2 * 10 * 4 * 64 * 2),  # for each head a bf16 of its own
        (4, 4, 40, False, 4 * (10 + 3 * 128) * 4 * (64 + 1)),
        (4, 4, 136, False, 4 * (10 + 3 * 128) * 4 * (192 + 1)),
        (4, 4, 64, True, 4 * (10 + 3 * 128) * 4 * (11 * 64 + 1)),  # 132 multiprocessors, 12 heads of documents
    ],
)
def test_the_backward_pass_of_attention_adds_up_in_float32_on_cuda(
    heads: int, kv_heads: int, width: int, deterministic: bool, expected: int
) -> None:
    query, key = (torch.empty(10, n, width, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    bounds = torch.tensor([0, 3, 7, 10], dtype=torch.int32)
    given = (query, query, key, key, query, torch.empty(heads, 10, device="meta"), bounds, bounds, 4, 4)
    backward = torch.ops.torch_attn._varlen_attn_backward.default
    with cuda_stand_in():
        assert scratch_bytes(backward, given, "cuda", deterministic) == expected
    assert scratch_bytes(torch.ops.aten.mm.default, (query[0], query[0].T), "cuda", deterministic) == 0


def test_the_scratch_space_of_attention_is_part_of_a_prediction_for_cuda(tmp_path: Path) -> None:
    resolved, rank_info, step = resolved_case(Case("llama", {**BF16, "model.kernels": "torch"}), tmp_path)
    on_cuda = replace(resolved, facts=replace(resolved.facts, kind="cuda", generation=9))
    trace = trace_step(on_cuda, rank_info, step)
    heads, width, (tokens, documents) = 4, 32, (90, 3)  # of eight columns
    sums = (tokens + 128 * documents) * heads * (width + 1) * 4 + 2 * tokens * heads * 8 * 2
    found = [storage for storage in trace.storages if storage.size == sums and storage.phase == "backward"]
    assert len(found) == 2 and {storage.part for storage in found} == {"other"}  # in each layer
