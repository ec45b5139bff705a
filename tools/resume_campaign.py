"""Kill training with SIGKILL at random steps of its second epoch, resume it, and compare with an unbroken run.

    python -m tools.resume_campaign --trials 20 --world-sizes 1 2 --seed 0
    python -m tools.resume_campaign --flags --optimizer.offload host --checkpoint.async_save true

A LoRA run with dropout and four microbatches per step is trained once unbroken per world size. Each trial trains it
anew, dies at a random step (all processes, or one of them and the launcher then kills the others), resumes in new
processes, and must end with the same tensors (SHA-256), the same loss log and the same optimizer moments. Prints one
JSON line per trial and a summary; exits with 1 when a trial differs. What follows ``--flags`` is
given to every run that is trained; a resume finds it in the run's recipe.
"""

import argparse
import json
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fixtures.trainings import STEPS_PER_EPOCH, outcome, prepare
from tools.commands import Results, Start, launch, parser_of, trained, workplace

# Dies in place of the given optimizer step on the given rank (-1: every rank), by the signal that nothing can catch.
KILLED = """
import os, signal, sys
import tuner.train.loop as loop
step, rank = int(sys.argv[1]), int(sys.argv[2])
real = loop.optimizer_step
def dying(state, index, *rest):
    if index == step and rank in (-1, state.step_config.mesh.rank):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(state, index, *rest)
loop.optimizer_step = dying
from tuner.cli.main import main
main(sys.argv[3:])
"""


def trial(  # noqa: PLR0913 - a kill, and what it is held against
    directory: Path,
    world_size: int,
    number: int,
    rng: random.Random,
    unbroken: dict[str, Any],
    start: Start,
    flags: Sequence[str] = (),
) -> dict[str, Any]:
    """One kill and resume."""
    step = rng.randrange(STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH)
    rank = rng.choice([-1, *range(world_size)])
    name = f"w{world_size}-t{number}"
    dying = ["-c", KILLED, str(step), str(rank), "train", "r.yaml", "--name", name, *flags]
    killed = launch(directory, world_size, dying, start)
    resumed = launch(directory, world_size, ["-m", "tuner", "resume", f"runs/{name}"], start)
    ended = outcome(directory / "runs" / name)
    return {
        "world_size": world_size,
        "trial": number,
        "killed_at_step": step + 1,
        "killed_rank": rank,
        "killed": -signal.SIGKILL in killed,
        "resumed": all(code == 0 for code in resumed),
        "identical": ended == unbroken and bool(ended["log"]),
    }


def campaign(
    directory: Path,
    world_size: int,
    trials: int,
    seed: int,
    start: Start = subprocess.Popen,
    flags: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """All trials at one world size, in `directory`, which is empty; `start` starts each process."""
    prepare(directory, world_size)
    trained(directory, world_size, ["-m", "tuner", "train", "r.yaml", "--name", "unbroken", *flags], start)
    unbroken = outcome(directory / "runs" / "unbroken")
    rng = random.Random(seed * 1000 + world_size)
    results = Results()
    for number in range(trials):
        results.add(trial(directory, world_size, number, rng, unbroken, start, flags))
    return results.rows


def main() -> int:
    """Run the campaign."""
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of `tuner train`, the last option here")
    options = parser.parse_args()
    results = []
    for world_size in options.world_sizes:
        with workplace() as directory:
            results += campaign(directory, world_size, options.trials, options.seed, flags=options.flags)
    good = sum(r["killed"] and r["resumed"] and r["identical"] for r in results)
    print(json.dumps({"trials": len(results), "identical": good, "seed": options.seed}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
