"""States in 8 bits and weights rounded stochastically, whose number of processes changes, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi.optimizer_steps import give
from tests.multi.worlds import trained, trained_by
from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.checkpoint.load import content_sha256
from tuner.checkpoint.open import open_checkpoint
from tuner.runtime.dist import RankInfo
from tuner.setup.build import Assembly

ROWS = [1, 20, 3, 15]
SHAPE = {"hidden_size": 64, "intermediate_size": 90}
"""Matrices just large enough for 8 bits, and rows that two or four processes cannot share evenly."""
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "8bit": {"optimizer": {"state": "8bit"}},
    "both": {"optimizer": {"state": "8bit", "rounding": "stochastic"}, "model": {"dtype": "bf16"}},
    "chance": {"optimizer": {"rounding": "stochastic"}, "model": {"dtype": "bf16"}},
}


def take(assembly: Assembly, step: int) -> None:
    state = assembly.train_state
    give(state.parameters, step, power=3)
    state.optimizer.set_factor(1.0 if step % 2 else 0.5)
    state.optimizer.step(torch.tensor(False), torch.tensor(2.0))
    state.optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("worlds", [(1, 2, 1), (4, 2, 1, 4)])
@pytest.mark.parametrize("way", WAYS)
def test_changes_of_processes_change_no_bit(way: str, worlds: tuple[int, ...], tmp_path: Path) -> None:
    write_model(tmp_path)
    model = {"init": "random", "config": SHAPE, **WAYS[way].get("model", {})}
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, **WAYS[way]["optimizer"]}
    train = {"global_batch_size": 4, "micro_batch_size": 1, "precision": model.get("dtype", "fp32")}
    recipe = recipe_for(tmp_path, train=train, model=model, optimizer=optimizer)

    def make(rank_info: RankInfo) -> Assembly:
        return assembly_for(recipe, ROWS, rank_info)

    whole = trained(make(RankInfo()), take, None, range(2 * len(worlds)), tmp_path / "whole")
    source = None
    for number, world in enumerate(worlds):
        steps = range(2 * number, 2 * number + 2)
        source = trained_by(world, make, take, source, steps, tmp_path / str(number))
        found = open_checkpoint(source)
        assert found.manifest["world_size"] == world
        codes = [entry for name, entry in found.index().items() if "_codes/" in name]
        assert any(len(entry.chunks) == world for entry in codes) or way == "chance", "codes lie in shards"
    assert source is not None
    assert content_sha256(open_checkpoint(source)) == content_sha256(open_checkpoint(whole))
