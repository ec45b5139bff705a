"""The losses of a tiny run, step by step: a change of the code that moves them is a change of what is computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.runtime.dist import RankInfo
from tuner.train.step import optimizer_step

# Trained tokens of the twelve rows, of which a step takes four, two at a time: uneven, so that a loss normalised per
# microbatch instead of once over the global batch shows.
TRAINED = [1, 20, 3, 15, 22, 7, 9, 2, 18, 5, 11, 21]
FULL: dict[str, Any] = {"optimizer": {"weight_decay": 0.1}}
LORA: dict[str, Any] = {"adapter": {"kind": "lora", "r": 4, "dropout": 0.2}, "model": {"dtype": "fp32"}}
# Measured on one thread of an x86-64 CPU in fp32 with torch 2.13. Change them only with the reason in the changelog.
LOSSES = {
    "full": [4.58749, 4.58769, 4.58078, 4.29676, 4.31652, 4.35832, 4.11773, 4.07478, 4.11706, 4.07276],
    "lora": [4.58749, 4.59033, 4.58068, 4.51947, 4.53734, 4.52315, 4.49864, 4.48873, 4.49731, 4.50090],
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "sections"), [("full", FULL), ("lora", LORA)])
def test_the_losses_are_those_of_the_golden_run(name: str, sections: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path)
    steps = {"duration": "10 steps", "global_batch_size": 4, "micro_batch_size": 2}
    everything: dict[str, dict[str, Any]] = {
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": "2 steps", "min_lr_ratio": 0.1},
        "train": steps,
    }
    for section, values in sections.items():
        everything[section] = {**everything.get(section, {}), **values}
    assembly = assembly_for(recipe_for(tmp_path, **everything), TRAINED, RankInfo())
    table, state = assembly.timetable, assembly.train_state
    losses = [
        optimizer_step(state, step, assembly.batches.step(step), table.schedule.factor(step + 1)).read().loss
        for step in range(table.plan.total_steps)
    ]
    assert losses == pytest.approx(LOSSES[name], rel=1e-4)
