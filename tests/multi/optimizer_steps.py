"""Steps with every optimizer at any world size: what they leave of losses, weights and moments."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.fixtures.tensors import whole
from tests.train.synthetic import assembly_for, recipe_for
from tuner.data.batches import StepBatches
from tuner.runtime.dist import RankInfo
from tuner.train.step import TrainState, forward_backward

ROWS = [1, 20, 3, 15, 0, 0, 20, 7, 5, 2]
"""Trained tokens of each row: uneven, and none for one of two ranks in the second step."""
STEPS = 6
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "lr": 1e-3},
    "adamw-host": {"kind": "adamw", "lr": 1e-3, "offload": "host"},
    "sgd": {"kind": "sgd", "lr": 1e-2, "nesterov": True},
    "adafactor": {"kind": "adafactor", "lr": 1e-3},
    "adafactor-scaled": {"kind": "adafactor", "lr": 1e-2, "scale_parameter": True},
    "muon": {"kind": "muon", "lr": 1e-3},
    "own": {
        "kind": "custom", "lr": 1e-3, "use": f"{Path(__file__).with_name('own_optimizer.py')}:RMSprop",
        "options": {"alpha": 0.9, "momentum": 0.5}, "elementwise": True,
    },
}


def backward(train_state: TrainState, batches: StepBatches) -> torch.Tensor:
    """Leave the gradients of a step's mean loss; this rank's summed loss."""
    sums, _ = forward_backward(train_state, 0, batches)
    return sums.losses["loss"].value


def give(parameters: dict[str, torch.nn.Parameter], step: int, power: int = 1) -> None:
    """Gradients drawn from a seed, to this power, the same at every world size."""
    for number, parameter in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(100 * step + number)
        gradient = (torch.randn(parameter.shape, generator=generator) ** power).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient


def trained(model: Path, kind: str, drawn: bool, rank_info: RankInfo) -> dict[str, torch.Tensor]:
    """Losses, weights and moments after a few steps with the model's gradients, or ones that are drawn. Collective."""
    recipe = recipe_for(
        model,
        train={"global_batch_size": 4, "micro_batch_size": 1, "precision": "fp32"},
        data={"shuffle": False, "train": str(model / "rows.jsonl")},
        optimizer={**OPTIMIZERS[kind], "weight_decay": 0.1},
    )
    assembly = assembly_for(recipe, ROWS, rank_info)
    train_state, losses = assembly.train_state, []
    start = {f"start/{name}": whole(parameter) for name, parameter in train_state.parameters.items()}
    for step in range(STEPS):
        if drawn:
            give(train_state.parameters, step)
        else:
            losses.append(backward(train_state, assembly.batches.step(step)))
        train_state.optimizer.set_factor(0.5 if step else 1.0)
        train_state.optimizer.step(torch.tensor(False), torch.tensor(2.0))
        train_state.optimizer.zero_grad()
    total = torch.stack(losses or [torch.ones(())])
    if rank_info.world_size > 1 and not drawn:
        torch.distributed.all_reduce(total)
    state = {name: whole(tensor) for name, tensor in train_state.optimizer.state_tensors().items()}
    return start | {"loss": total} | {name: whole(p) for name, p in train_state.parameters.items()} | state
