"""Takes real optimizer steps at this world size and prints losses and gradient norms as JSON."""

import json
import sys
from pathlib import Path

from tests.train.synthetic import assembly_for, recipe_for
from tuner.runtime.launch import Launch
from tuner.runtime.process import process_group
from tuner.train.step import optimizer_step


def main() -> None:
    options = json.loads(sys.argv[1])
    launch = Launch.from_environment()
    recipe = recipe_for(
        Path(options["model"]),
        adapter=options["adapter"],
        train={
            "global_batch_size": options["global"],
            "micro_batch_size": options["micro"],
            "precision": options["precision"],
        },
        data={"shuffle": False, "train": str(Path(options["model"]) / "rows.jsonl")},
    )
    with process_group(launch, "cpu", 120):
        assembly = assembly_for(recipe, options["trained"], launch)
        results = [
            optimizer_step(assembly.learner, step, assembly.batches.step(step), 1.0).read()
            for step in range(options["steps"])
        ]
    if launch.is_main:
        print(json.dumps({"loss": [r.loss for r in results], "grad_norm": [r.grad_norm for r in results]}))


if __name__ == "__main__":
    main()
