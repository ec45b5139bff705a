"""State of zeros: what torch's own are, without memory before the first write."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tuner.train.moments import SMALL, zeros_like


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
