"""Takes drawn steps with compact optimizer states at this world size, from a checkpoint of any other, and saves one."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.train.synthetic import assembly_for, recipe_for
from tuner.checkpoint.load import load_into
from tuner.checkpoint.open import open_checkpoint
from tuner.checkpoint.save import CheckpointDir, save
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.setup.build import run_tensors

ROWS = [1, 20, 3, 15]
SHAPE = {"hidden_size": 64, "intermediate_size": 90}
"""Matrices just large enough for 8 bits, and rows that two or four processes cannot share evenly."""
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "8bit": {"optimizer": {"state": "8bit"}},
    "both": {"optimizer": {"state": "8bit", "rounding": "stochastic"}, "model": {"dtype": "bf16"}},
    "chance": {"optimizer": {"rounding": "stochastic"}, "model": {"dtype": "bf16"}},
}


def give(parameters: dict[str, torch.nn.Parameter], step: int) -> None:
    """Gradients drawn from a seed, the same at every world size."""
    for number, parameter in enumerate(parameters.values()):
        generator = torch.Generator().manual_seed(100 * step + number)
        gradient = torch.randn(parameter.shape, generator=generator) ** 3
        gradient = gradient.to(parameter.dtype)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = gradient


def trained(model: Path, way: str, rank_info: RankInfo, source: Path | None, steps: range, target: Path) -> Path:
    """Steps of these numbers, from a checkpoint unless they are the first ones; the one that is saved. Collective."""
    sections = {name: dict(values) for name, values in WAYS[way].items()}
    sections["model"] = {"init": "random", "config": SHAPE, **sections.get("model", {})}
    sections["optimizer"] |= {"lr": 1e-3, "weight_decay": 0.1}
    precision = sections["model"].get("dtype", "fp32")
    train = {"global_batch_size": 4, "micro_batch_size": 1, "precision": precision}
    assembly = assembly_for(recipe_for(model, train=train, **sections), ROWS, rank_info)
    state = assembly.train_state
    if source is not None:
        load_into(open_checkpoint(source), run_tensors(state))
        state.optimizer.set_step_count(steps.start)
    for step in steps:
        give(state.parameters, step)
        state.optimizer.set_factor(1.0 if step % 2 else 0.5)
        state.optimizer.step(torch.tensor(False), torch.tensor(2.0))
        state.optimizer.zero_grad()
    return save(CheckpointDir(target, "run"), steps.stop, run_tensors(state), {"step": steps.stop}, {})


def main() -> None:
    model, way, source, first, last, target = sys.argv[1:]
    rank_info = RankInfo.from_environment()
    with process_group(rank_info, "cpu", 120):
        place = None if source == "-" else Path(source)
        made = trained(Path(model), way, rank_info, place, range(int(first), int(last)), Path(target))
    if rank_info.is_main:
        print(made)


if __name__ == "__main__":
    main()
