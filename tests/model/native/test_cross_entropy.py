"""The compiled cross-entropy gives torch's loss and gradient for any number of columns."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tuner.model.kernels import native_into_gradient
from tuner.model.output_layer import OutputLayer


@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 64, 1000, 8192 + 5])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_equals_torch(columns: int, dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits = (torch.randn(9, columns, generator=generator) * 8).to(dtype)
    targets = torch.randint(0, columns, (9,), generator=generator)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, exact)
    for wants_gradient in (False, True):
        found = logits.clone()
        loss = native_into_gradient(found, targets, wants_gradient)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-5)
        if not wants_gradient:
            assert torch.equal(found, logits)
        else:
            scale = gradient.abs().max().clamp_min(1e-3)
            assert float((found.double() - gradient).abs().max() / scale) < allowed


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_weights_of_the_rows(dtype: torch.dtype, allowed: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(9, 83, generator=generator) * 8).to(dtype)
    targets, weights = torch.randint(0, 83, (9,), generator=generator), torch.rand(9, generator=generator)
    weights[4] = 0.0
    exact = logits.double().requires_grad_()
    expected = (cross_entropy(exact, targets, reduction="none") * weights).sum()
    (gradient,) = torch.autograd.grad(expected, exact)
    loss = native_into_gradient(logits, targets, True, weights)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    assert float((logits.double() - gradient).abs().max() / gradient.abs().max()) < allowed
    assert not logits[4].any()


def test_weights_of_one_change_no_bit() -> None:
    logits, targets = torch.randn(9, 83), torch.randint(0, 83, (9,))
    plain, weighted = logits.clone(), logits.clone()
    losses = native_into_gradient(plain, targets, True), native_into_gradient(weighted, targets, True, torch.ones(9))
    assert torch.equal(*losses)
    assert torch.equal(plain, weighted)


def test_the_first_and_the_last_column_and_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0] * 7, [-1e30] * 20 + [3.0]])
    targets = torch.tensor([1, 20])
    found = logits.clone()
    loss = native_into_gradient(found, targets, True)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="sum")
    torch.testing.assert_close(loss.double(), expected.detach())
    torch.testing.assert_close(found.double(), torch.autograd.grad(expected, exact)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(bad: float) -> None:
    for place in (0, 17, 39):
        logits = torch.zeros(2, 40)
        logits[1, place] = bad
        assert not native_into_gradient(logits, torch.tensor([3, 3]), True).isfinite()
        assert logits[0].isfinite().all() and not logits[1].isfinite().all()


def test_no_rows_and_other_types() -> None:
    assert native_into_gradient(torch.empty(0, 40), torch.empty(0, dtype=torch.int64), True) == 0
    double, targets = torch.randn(4, 7, dtype=torch.float64), torch.tensor([0, 1, 2, 6])
    expected = cross_entropy(double, targets, reduction="sum")
    torch.testing.assert_close(native_into_gradient(double.clone(), targets, False), expected)


def test_a_wrong_target_is_refused() -> None:
    for target in (-1, 7):
        with pytest.raises(IndexError, match="target"):
            native_into_gradient(torch.zeros(1, 7), torch.tensor([target]), True)


def test_through_the_linear_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=generator).requires_grad_() for n in (30, 50))
    targets = torch.randint(0, 50, (30,), generator=generator)
    found = OutputLayer(weight, kernel=native_into_gradient).cross_entropy(hidden, targets)
    expected = cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(found, expected)
    grads, wanted = (torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected))
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)
