"""Layers of frozen codes with trained adapters, sharded by FSDP2: what is not as in one process is named and fails."""

import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tuner.model.quantize.codes import Kind, quantize
from tuner.model.quantize.product import quantized_linear
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group

SHAPES = ((64, 130), (5, 64), (1, 5), (130, 1))
"""Rows and columns of the layers: also fewer rows than processes, and other numbers of them on each."""
STEPS = 2


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
    parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
    for _ in range(STEPS):
        loss = torch.stack([block(one).square().sum() for one in inputs]).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=1e-3)  # type: ignore[arg-type]
                parameter.grad = None
    named = block.named_parameters()
    return {name: one.full_tensor() if isinstance(one, DTensor) else one.detach() for name, one in named}


def problems(kind: Kind, reshard: bool, rank_info: RankInfo) -> list[str]:
    """What differs between a sharded block and a whole one."""
    inputs = [torch.randn(3, 130, generator=torch.Generator().manual_seed(i)) for i in range(rank_info.world_size)]
    whole, sharded = Block(kind), Block(kind)
    stored = {name: one.detach().clone() for name, one in whole.named_parameters()}
    expected = trained(whole, inputs)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (rank_info.world_size,)), reshard_after_forward=reshard)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    found = []
    for name, one in sharded.named_parameters():
        frozen = name.endswith(("codes", "scales"))
        parts = stored[name].chunk(rank_info.world_size)
        own = parts[rank_info.rank] if rank_info.rank < len(parts) else stored[name][:0]
        if not isinstance(one, DTensor) or not torch.equal(one.to_local(), own) or one.requires_grad == frozen:
            found.append(f"{kind} {name}: its shard is not its rows, or it is frozen wrongly")
    for name, one in trained(sharded, [inputs[rank_info.rank]]).items():
        frozen = name.endswith(("codes", "scales"))
        same = torch.equal(one, stored[name]) if frozen else torch.allclose(one, expected[name], rtol=1e-5, atol=1e-6)
        if one.dtype != stored[name].dtype or not same:
            found.append(f"{kind} {name}: gathered, it is another than in one process")
        if not frozen and torch.equal(one, stored[name]):
            found.append(f"{kind} {name}: was not trained")
    return found


def main() -> int:
    rank_info = RankInfo.from_environment()
    kinds: tuple[Kind, Kind] = ("nf4", "int8")
    with process_group(rank_info, "cpu", 120):
        wishes = ((kind, reshard) for kind in kinds for reshard in (True, False))
        found = [problem for kind, reshard in wishes for problem in problems(kind, reshard, rank_info)]
    print("\n".join(found) or "all as in one process", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
