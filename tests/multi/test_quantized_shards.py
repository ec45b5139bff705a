"""Frozen codes and scales are sharded and gathered by FSDP2 as bytes, next to adapters that are trained."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import whole
from tuner.model.quantize.codes import Kind, quantize
from tuner.model.quantize.linear import quantized_linear

SHAPES = ((64, 130), (5, 64), (1, 5), (130, 1))
"""Rows and columns of the layers: also fewer rows than processes, and other numbers of them on each."""
STEPS = 2
INPUTS = [torch.randn(3, 130, generator=torch.Generator().manual_seed(i)) for i in range(2)]


class Layer(nn.Module):
    """A frozen quantised weight beside two trained factors."""

    def __init__(self, kind: Kind, rows: int, columns: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rows)
        made = quantize(torch.randn(rows, columns, generator=generator), kind)
        self.codes = nn.Parameter(made.codes, requires_grad=False)
        self.scales = nn.Parameter(made.scales, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, columns, generator=generator))
        self.up = nn.Parameter(torch.randn(rows, 2, generator=generator))

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return quantized_linear(source, self.codes, self.scales) + source @ self.down.T @ self.up.T


class Block(nn.Module):
    """Layers one after the other."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, rows, columns) for rows, columns in SHAPES)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            source = torch.tanh(layer(source))
        return source


def trained(block: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters after a few steps of plain gradient descent over the inputs that are this process's, whole."""
    optimizer = torch.optim.SGD((one for one in block.parameters() if one.requires_grad), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.stack([block(one).square().sum() for one in inputs]).sum().backward()
        optimizer.step()
    return {name: whole(one.detach()) for name, one in block.named_parameters()}


def check(kind: Kind, reshard: bool, rank: int) -> None:
    """Hold a sharded block to a whole one."""
    alone, sharded = Block(kind), Block(kind)
    stored = {name: one.detach().clone() for name, one in alone.named_parameters()}
    expected = trained(alone, INPUTS)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    frozen = {name for name in stored if name.endswith(("codes", "scales"))}
    for name, one in sharded.named_parameters():
        parts = stored[name].chunk(2)
        own = parts[rank] if rank < len(parts) else stored[name][:0]
        assert isinstance(one, DTensor) and torch.equal(one.to_local(), own), f"{kind} {name}: its rows"
        assert one.requires_grad == (name not in frozen), f"{kind} {name}"
    for name, one in trained(sharded, [INPUTS[rank]]).items():
        assert one.dtype == stored[name].dtype
        assert torch.equal(one, stored[name]) == (name in frozen), f"{kind} {name}: trained, or not"
        if name not in frozen:
            torch.testing.assert_close(one, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.multi
def test_codes_and_scales_are_gathered_to_the_bit_and_adapters_train_as_in_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for kind in get_args(Kind):
            for reshard in (True, False):
                check(kind, reshard, rank)

    assert run_ranks(2, tmp_path, work) == [0, 0]
