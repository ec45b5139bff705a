"""The losses of a tiny run, step by step: a change of the code that moves them is a change of what is computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.synthetic import assembly_for, recipe_for, write_model
from tuner.runtime.launch import Launch
from tuner.train.step import optimizer_step

# Trained tokens of the twelve rows, of which a step takes four, two at a time: uneven, so that a loss normalised per
# microbatch instead of once over the global batch shows.
TRAINED = [1, 20, 3, 15, 22, 7, 9, 2, 18, 5, 11, 21]
FULL: dict[str, Any] = {"optimizer": {"weight_decay": 0.1}}
LORA: dict[str, Any] = {"adapter": {"kind": "lora", "r": 4, "dropout": 0.2}, "model": {"dtype": "fp32"}}
# Measured on one thread of an x86-64 CPU in fp32 with torch 2.13. Change them only with the reason in the changelog.
LOSSES = {
    "full": [4.58749, 4.50049, 4.58465, 4.19821, 4.31595, 4.36558, 4.11769, 4.07596, 4.06563, 4.01060],
    "lora": [4.58749, 4.50279, 4.58285, 4.41923, 4.53688, 4.51896, 4.51030, 4.51106, 4.44254, 4.42842],
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
    assembly = assembly_for(recipe_for(tmp_path, **everything), TRAINED, Launch())
    table = assembly.timetable
    losses = [
        optimizer_step(assembly.learner, step, assembly.batches.step(step), table.schedule.factor(step + 1)).read().loss
        for step in range(table.plan.total_steps)
    ]
    assert losses == pytest.approx(LOSSES[name], rel=1e-4)
