"""Real optimizer steps on one process and on two, and what came out of each."""

import json
import warnings
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

from tests.fixtures.processes import run_ranks
from tests.train.synthetic import assembly_for, recipe_for
from tuner.model import blocks as compiling
from tuner.runtime.dist import RankInfo
from tuner.train.step import optimizer_step

Wish = dict[str, Any]


def steps_of_two(wishes: list[Wish], directory: Path) -> list[dict[str, Any]]:
    """What `take_steps` gives on the first of two processes, for each wish."""

    def work(rank: int) -> None:
        warnings.simplefilter("ignore")  # what is traced is looked at in ways that warn
        compiling.BACKEND = "aot_eager"  # layers are traced and differentiated as when compiled, and run as they are
        rank_info = RankInfo(rank, 2, rank, 2)
        found = [take_steps(wish, rank_info) for wish in wishes]
        if rank == 0:
            (directory / "two.json").write_text(json.dumps(found), encoding="utf-8")

    assert run_ranks(2, directory, work, timeout_s=300) == [0, 0]
    found: list[dict[str, Any]] = json.loads((directory / "two.json").read_bytes())
    return found


def take_steps(wish: Wish, rank_info: RankInfo) -> dict[str, Any]:
    """Losses and gradient norms of every step, names of the trained parameters, and how often layers were compiled."""
    recipe = recipe_for(
        Path(wish["model"]),
        adapter=wish["adapter"],
        model={"name_or_path": wish["model"], **wish.get("model_keys", {})},
        train={
            "global_batch_size": 4, "micro_batch_size": 4 // rank_info.world_size,
            "precision": wish.get("precision", "fp32"), **wish.get("train", {}),
        },
        data={"shuffle": False},
    )
    counters.clear()
    assembly = assembly_for(recipe, [1, 20, 3, 15, 7, 5], rank_info, new_ids=range(*wish.get("new_ids", (0, 0))))
    results = [optimizer_step(assembly.train_state, step, assembly.batches.step(step), 1.0).read() for step in range(3)]
    return {
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "compilations": counters["stats"]["unique_graphs"],
        "trained": sorted(assembly.train_state.parameters),
    }
