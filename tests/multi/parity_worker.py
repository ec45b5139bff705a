"""Takes real optimizer steps at this world size, for one wish or several, and prints what came out as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

from tests.train.synthetic import assembly_for, recipe_for
from tuner.model import blocks as compiling
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.train.step import optimizer_step


def main() -> None:
    wishes = json.loads(sys.argv[1])
    rank_info = RankInfo.from_environment()
    compiling.BACKEND = "aot_eager"  # layers are traced and differentiated as for a compilation, and run as they are
    with process_group(rank_info, "cpu", 120):
        found = [take_steps(wish, rank_info) for wish in (wishes if isinstance(wishes, list) else [wishes])]
    if rank_info.is_main:
        print(json.dumps(found if isinstance(wishes, list) else found[0]))


def take_steps(options: dict[str, Any], rank_info: RankInfo) -> dict[str, Any]:
    """Losses and gradient norms of every step, names of the trained parameters, and how often layers were compiled."""
    recipe = recipe_for(
        Path(options["model"]),
        adapter=options["adapter"],
        model={"name_or_path": options["model"], **options.get("model_keys", {})},
        train={
            "global_batch_size": options["global"],
            "micro_batch_size": options["micro"],
            "precision": options["precision"],
            **options.get("train", {}),
        },
        data={"shuffle": False, "train": str(Path(options["model"]) / "rows.jsonl")},
    )
    counters.clear()
    assembly = assembly_for(recipe, options["trained"], rank_info, new_ids=range(*options.get("new_ids", (0, 0))))
    results = [
        optimizer_step(assembly.train_state, step, assembly.batches.step(step), 1.0).read()
        for step in range(options["steps"])
    ]
    return {
        "loss": [r.loss for r in results],
        "grad_norm": [r.grad_norm for r in results],
        "compilations": counters["stats"]["unique_graphs"],
        "trained": sorted(assembly.train_state.parameters),
    }


if __name__ == "__main__":
    main()
