"""The norm of gradients does not depend on how they are divided."""

import pytest
import torch

from tuner.parallel.fsdp import sum_of_squares


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    return torch.randn(24576, 576, generator=torch.Generator().manual_seed(0)) * 1e-3


def test_a_large_tensor_is_added_up_exactly(gradient: torch.Tensor) -> None:
    exact = gradient.double().square().sum()
    assert abs(sum_of_squares([gradient]) / exact - 1) < 1e-7
    assert abs(torch.linalg.vector_norm(gradient).double().square() / exact - 1) > 1e-4, "else torch's norm would do"


def test_shards_add_up_to_the_whole(gradient: torch.Tensor) -> None:
    shards = [sum_of_squares([piece]) for piece in gradient.split(10000)]
    assert abs(sum(shards) / sum_of_squares([gradient]) - 1) < 1e-7


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (4096,), (4097,), (2, 4096), (0, 7)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = 2 * float(tensor.double().square().sum())
    assert float(sum_of_squares([tensor, tensor.clone()])) == pytest.approx(expected, 1e-6)
