"""What a device is given of files in blocks: every element, cast where it goes, and nothing of a file that ended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tuner.parallel.values
from tuner.errors import DataError
from tuner.model.unread import InFile
from tuner.parallel.values import READERS, FileBlocks

file_blocks: Any = tuner.parallel.values
CPU = torch.device("cpu")
COUNT = 1000


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(file_blocks, "BLOCK", 64)
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def place(values: torch.Tensor, tmp_path: Path) -> InFile:
    (tmp_path / "weights").write_bytes(b"header" + values.view(torch.uint8).numpy().tobytes())
    return InFile(str(tmp_path / "weights"), 6, torch.bfloat16, (COUNT,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_target_gets_its_elements(values: torch.Tensor, place: InFile, dtype: torch.dtype) -> None:
    whole, part = torch.empty(10, 100, dtype=dtype), torch.zeros(8, 20, dtype=dtype)
    number = torch.empty((), dtype=dtype)
    with FileBlocks(CPU) as blocks:
        blocks.give(whole, place)
        blocks.give(part[2:5], place, 137)
        blocks.give(number, place, COUNT - 1)
        blocks.give(torch.empty(0), place)
        assert blocks._n_blocks == 2 * READERS, "memory is a few blocks, whatever is read"
    assert torch.equal(whole, values.view(10, 100).to(dtype))
    assert torch.equal(part[2:5].reshape(-1), values[137:197].to(dtype))
    assert not part[:2].any() and not part[5:].any()
    assert number == values[-1]


def test_parameters_get_theirs_in_place(values: torch.Tensor, place: InFile) -> None:
    weight = nn.Parameter(torch.zeros(COUNT))
    with FileBlocks(CPU) as blocks:
        blocks.give(weight, place)
    assert torch.equal(weight.detach(), values.float()) and weight.grad_fn is None


def test_a_file_that_ends_early_is_named(values: torch.Tensor, place: InFile) -> None:
    Path(place.path).write_bytes(Path(place.path).read_bytes()[:1000])
    with pytest.raises(DataError, match=r"weights: it ends before byte \d+"), FileBlocks(CPU) as blocks:
        blocks.give(torch.empty(COUNT), place)


def test_what_failed_besides_is_raised(values: torch.Tensor, place: InFile) -> None:
    with pytest.raises(KeyError), FileBlocks(CPU) as blocks:
        blocks.give(torch.empty(COUNT), place)
        raise KeyError
