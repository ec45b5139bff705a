"""Measures a step of `tuner train` idle and while another program takes a core, against another commit's tree.

    git worktree add ../before COMMIT
    python -m tools.bench_busy --model DIR --against ../before [--rounds 3] [--steps 12]

Full fine-tuning of the model of `bench_train.py smollm2-full` with the command's defaults but for evaluation, on all
cores. The runs of both trees alternate, idle and busy, in each round. `first` is the slowest of the first three steps,
`step` the median of the others, in seconds; a table goes to stderr, one JSON object with the medians over the rounds to
stdout. The other program is a loop that computes and never waits, one process for each core that it takes.
"""

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench_train import Bench
from tools.bench_train_cases import CASES
from tools.commands import ROOT, asked, done, environment, read_lines, say, workplace

FIRST = 3


@contextmanager
def taken_cores(number: int) -> Iterator[None]:
    """Within, `number` processes compute without a pause."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def train(tree: Path, work: Path) -> dict[str, float]:
    """Run the command of `tree` on the prepared recipe in `work`: seconds of its first steps and of the others."""
    run = work / "run"
    shutil.rmtree(run, ignore_errors=True)
    env = environment(work / "cache", threads=None, PYTHONPATH=str(tree))
    flags = ["--eval.every", "never", "--eval.at_start", "false", "--eval.at_end", "false"]
    done(["-m", "tuner", "train", str(work / "recipe.yaml"), "--checkpoint.at_end", "false", *flags], work, env)
    steps = [line["step_s"] for line in read_lines(run / "metrics.jsonl", "train")]
    return {"first": max(steps[:FIRST]), "step": statistics.median(steps[FIRST:])}


def measure(model: Path, trees: dict[str, Path], rounds: int, steps: int) -> dict[str, Any]:
    """Alternate the trees, idle and with one core taken; medians over the rounds."""
    took: dict[str, list[dict[str, float]]] = {}
    with workplace() as work:
        Bench(replace(CASES["smollm2-full"], steps=steps), model, work, "cpu", []).prepare()
        for number in range(1, rounds + 1):
            for cores in (0, 1):
                for name, tree in trees.items():
                    with taken_cores(cores):
                        seconds = train(tree, work)
                    took.setdefault(f"{name}, {'busy' if cores else 'idle'}", []).append(seconds)
                    told = f"first {seconds['first']:7.2f} s, then {seconds['step']:6.2f} s"
                    say(f"round {number}  {name:8} {'busy' if cores else 'idle'}  {told}")
    return {
        side: {key: round(statistics.median(run[key] for run in runs), 3) for key in ("first", "step")}
        for side, runs in took.items()
    }


def main() -> None:
    given = asked(
        __doc__, model={"type": Path, "required": True}, against=(Path, "the tree of another commit"), rounds=3,
        steps=12,
    )
    trees = {"here": ROOT} | ({"against": given.against.resolve()} if given.against else {})
    report = measure(given.model.resolve(), trees, given.rounds, given.steps)
    for name in trees:
        idle, busy = report[f"{name}, idle"], report[f"{name}, busy"]
        report[f"{name}, busy over idle"] = {key: round(busy[key] / idle[key], 2) for key in idle}
    if "against" in trees:
        here, against = report["here, idle"], report["against, idle"]
        report["idle, here over against"] = {key: round(here[key] / against[key], 3) for key in here}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
