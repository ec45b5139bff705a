"""Blocks of documents give plain masked attention, in value and gradients."""

import pytest
import torch

from tests.fixtures.packed import masked_attention
from tuner.model import blocked_attention
from tuner.model.blocked_attention import attend_documents, plan_blocks
from tuner.model.documents import Documents

CPU = torch.device("cpu")


def inputs(lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, sum(lengths), 8), (2, sum(lengths), 8), (2, sum(lengths), 6))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [0, 8, 20])
@pytest.mark.parametrize("lengths", [(1,), (40,), (5, 40, 1, 23), (3, 4, 2, 16, 1, 1, 33)])
def test_equals_masked_attention(lengths: tuple[int, ...], window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK_QUERIES", 16)
    plan_blocks.cache_clear()
    leaves = inputs(lengths)
    found = attend_documents(*leaves, Documents.of(lengths, CPU).host, window, 0.3)
    expected = masked_attention(*leaves, lengths, window, 0.3)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    plan_blocks.cache_clear()


def test_many_keys_make_smaller_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK_SCORES", 4 * 16 * 160)
    plan_blocks.cache_clear()
    assert max(b.end - b.start for b in plan_blocks((0, 300), 0, 4, torch.float64, CPU)) < 128
    leaves = inputs((300,))
    found = attend_documents(*leaves, Documents.of((300,), CPU).host, 0, 0.3)
    torch.testing.assert_close(found, masked_attention(*leaves, (300,), 0, 0.3), rtol=0, atol=1e-12)
    plan_blocks.cache_clear()


def test_scores_of_bf16_inputs_are_not_rounded_to_bf16() -> None:
    lengths = (200, 90)
    q, k, v = (leaf.detach() for leaf in inputs(lengths, torch.bfloat16))
    exact = masked_attention(q.double(), k.double(), v.double(), lengths, 0, 4.0)
    before = torch.backends.mkldnn.matmul.fp32_precision
    found = attend_documents(q, k, v, Documents.of(lengths, CPU).host, 0, 4.0)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    # Rounding shares and result costs 3e-3; rounded scores, of up to 100 here, would cost 1e-1.
    assert (found.double() - exact).norm() / exact.norm() < 6e-3


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_is_told_of_results_holds(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Heads lie inside tokens, as projections leave them: results have the layout that was announced."""
    lengths = (5, 40, 23)
    leaves = [torch.randn(68, n, 8, dtype=dtype).transpose(0, 1).requires_grad_() for n in (heads[0], *heads[1:] * 2)]
    bounds = Documents.of(lengths, CPU).host
    torch.library.opcheck(attend_documents, (*leaves, bounds, 0, 0.3), test_utils=("test_schema", "test_faketensor"))
    upstream = torch.randn(68, heads[0], 8, dtype=dtype)
    arguments = (upstream, *(leaf.detach() for leaf in leaves), bounds, 0, 0.3, 0.0)
    torch.library.opcheck(blocked_attention._backward, arguments, test_utils=("test_schema", "test_faketensor"))
