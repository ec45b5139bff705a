"""The compiled kernel gives plain masked attention, in value and gradients, whatever the layout and the threads."""

from itertools import product
from typing import Any

import pytest
import torch

from tests.fixtures.packed import masked_attention
from tuner.model import attention
from tuner.model.documents import Documents
from tuner.model.native import attention as native
from tuner.model.native import library
from tuner.model.native.attention import native_attention

CPU = torch.device("cpu")
LENGTHS = [(1,), (40,), (5, 40, 1, 23), (130, 300, 64, 65, 1)]
WINDOWS, WIDTHS = (0, 1, 20, 150), ((32, 32), (8, 6), (20, 48), (80, 16))
OF_BLOCKS = [*zip(WINDOWS, WIDTHS, strict=True), (0, (8, 6)), (150, (32, 32))]
"""Windows and widths that documents of several blocks are taken with."""


def inputs(n_tokens: int, dtype: torch.dtype, widths: tuple[int, int] = (32, 32)) -> list[torch.Tensor]:
    """Query, key and value as projections leave them: the heads of a token lie together."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, widths[0]), (2, widths[0]), (2, widths[1]))
    made = (torch.randn(n_tokens, *shape, generator=generator).to(dtype).transpose(0, 1) for shape in shapes)
    return [leaf.requires_grad_() for leaf in made]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-12))


@pytest.mark.parametrize(
    ("lengths", "window", "widths"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] == LENGTHS[-1] and case[1:] not in OF_BLOCKS else ())
        for case in product(LENGTHS, WINDOWS, WIDTHS)
    ],
)
def test_equals_plain(lengths: tuple[int, ...], window: int, widths: tuple[int, int]) -> None:
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        leaves = inputs(sum(lengths), dtype, widths)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        found, _ = native_attention(*leaves, Documents.of(lengths, CPU).host, window, 0.3)
        exact = masked_attention(*doubles, lengths, window, 0.3)
        upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert found.dtype == dtype and relative(found, exact) < allowed
        grads = torch.autograd.grad(found, leaves, upstream)
        for grad, expected in zip(grads, torch.autograd.grad(exact, doubles, upstream.double()), strict=True):
            if float(expected.norm()) < 1e-9:  # one key: its share is 1, whatever query and key are
                assert float(grad.float().norm()) < (1e-4 if dtype == torch.float32 else 2e-1)
            else:
                assert relative(grad, expected) < allowed


def test_the_same_bits_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = LENGTHS[-1]
    leaves, found = inputs(sum(lengths), torch.bfloat16), []
    upstream = torch.randn(sum(lengths), 4, 32)
    for count in (1, 2, 3):
        monkeypatch.setattr(library, "threads", lambda count=count: count)
        output, _ = native_attention(*leaves, Documents.of(lengths, CPU).host, 0, 0.3)
        found.append([output, *torch.autograd.grad(output, leaves, upstream.bfloat16())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_document_does_not_depend_on_its_neighbours() -> None:
    leaves = [leaf.detach() for leaf in inputs(200, torch.float32)]
    alone, _ = native_attention(*(leaf[:, :70] for leaf in leaves), Documents.of((70,), CPU).host, 0, 0.3)
    packed, _ = native_attention(*leaves, Documents.of((70, 130), CPU).host, 0, 0.3)
    assert torch.equal(packed[:70], alone)


def test_huge_scores_stay_finite() -> None:
    q, k, v = (leaf.detach() for leaf in inputs(90, torch.float32))
    exact = masked_attention(q.double() * 300, k.double(), v.double(), (90,), 0, 1.0)
    found, _ = native_attention(q * 300, k, v, Documents.of((90,), CPU).host, 0, 1.0)
    assert relative(found, exact) < 1e-4


def test_a_number_that_is_none_is_not_hidden() -> None:
    leaves = [leaf.detach() for leaf in inputs(50, torch.float32)]
    leaves[1][0, 20, 3] = torch.nan
    found, _ = native_attention(*leaves, Documents.of((50,), CPU).host, 0, 0.3)
    assert found[:20].isfinite().all() and not found[20:, :2].isfinite().any(-1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_compiler_is_told_of_results_holds(dtype: torch.dtype) -> None:
    leaves, bounds = inputs(68, dtype), Documents.of((5, 40, 23), CPU).host
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(native_attention, (*leaves, bounds, 0, 0.3), test_utils=tests)
    inputs_, results = [leaf.detach() for leaf in leaves], native_attention(*leaves, bounds, 0, 0.3)
    arguments = (torch.randn(68, 4, 32, dtype=dtype), *inputs_, *(r.detach() for r in results), bounds, 0, 0.3)
    torch.library.opcheck(native._backward, arguments, test_utils=tests)


def test_what_the_kernel_does_not_compute_is_computed_by_torch() -> None:
    """A soft bound of the scores and float64, through the function that transformers calls."""
    documents = Documents.of((30, 38), CPU)
    for dtype, options in ((torch.float32, {"softcap": 5.0}), (torch.float64, {})):
        given: dict[str, Any] = {"documents": documents, **options}
        leaves = [leaf.detach().to(dtype)[None] for leaf in inputs(68, torch.float32)]
        found, _ = attention.compiled_attention(torch.nn.Identity(), *leaves, **given)
        expected, _ = attention.packed_attention(torch.nn.Identity(), *leaves, **given)
        assert torch.equal(found, expected)
    found, _ = attention.compiled_attention(
        torch.nn.Identity(), *(leaf.float() for leaf in leaves), documents=documents
    )
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)
