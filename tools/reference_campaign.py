"""Kill preference training with SIGKILL at random moments, its reference's computation included, and run it again.

    python -m tools.reference_campaign --kills 40 --world-sizes 1 2 --seed 0

Tiny pairs of answers are trained on with DPO, against columns that the launch computes first. For each number of
processes it is done once unbroken. Each trial begins without columns, is killed at a moment drawn from the whole time
that the unbroken run took (all processes, or one of them and the launcher then kills the others), and the same command
again must end with the same columns and the same tensors (SHA-256), and the same log. Prints one JSON line for each
trial and the figures at the end; exits with 1 when a trial differs.
"""

import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fixtures import forked, paired
from tests.fixtures.trainings import outcome
from tools.commands import Results, Start, asked, launch, trained, workplace

PAIRS, STEPS = 600, 12
TRAIN = ["-m", "tuner", "train", "r.yaml", "--resume", "auto", "--train.duration", f"{STEPS} steps"]


def ended(directory: Path, name: str) -> dict[str, Any]:
    """What a run is judged by, its columns included."""
    made = sorted((directory / "cache" / "reference").glob("[0-9a-f]*/manifest.json"))
    columns = {path.parent.name: json.loads(path.read_text())["files"] for path in made}
    return {**outcome(directory / "runs" / name), "columns": columns}


def where(directory: Path, name: str) -> str:
    """What a run was at when it was killed."""
    reference = directory / "cache" / "reference"
    if (directory / "runs" / name / "run.json").is_file():
        return "training"
    parts = [path for path in reference.glob(".tmp-*-parts*/*.npz")]
    if parts or any(reference.glob(".tmp-*")):
        return f"reference, {len(parts)} parts"
    return "after the reference" if any(reference.glob("[0-9a-f]*")) else "before"


def trial(
    directory: Path, world_size: int, number: int, rng: random.Random, unbroken: dict[str, Any], start: Start
) -> dict[str, Any]:
    """One kill, and the same command again."""
    shutil.rmtree(directory / "cache" / "reference")
    name, rank = f"w{world_size}-t{number}", rng.choice([-1, *range(world_size)])
    moment = rng.uniform(0.0, unbroken["seconds"])
    killed = launch(directory, world_size, [*TRAIN, "--name", name], start, kill=(moment, rank))
    at = where(directory, name)
    codes = launch(directory, world_size, [*TRAIN, "--name", name], start)
    found = ended(directory, name) if not any(codes) else None
    return {
        "world_size": world_size, "trial": number, "seconds": round(moment, 3), "killed": any(killed),
        "at": at if any(killed) else "finished", "resumed": not any(codes), "identical": found == unbroken["outcome"],
    }


def campaign(
    directory: Path, world_size: int, kills: int, seed: int, start: Start = forked.Popen, pairs: int = PAIRS
) -> list[dict[str, Any]]:
    """Trials at one number of processes until so many runs were killed before their end.

    `directory` is empty; `start` starts each process.
    """
    paired.prepare(directory, pairs)
    start([sys.executable, "-c", "pass"], cwd=directory).wait()  # whatever starts processes is there from here on
    seconds = 0.0
    for name in ("first", "unbroken"):  # the first one also makes what later ones find in the cache
        shutil.rmtree(directory / "cache" / "reference", ignore_errors=True)
        began = time.monotonic()
        trained(directory, world_size, [*TRAIN, "--name", name], start)
        seconds = time.monotonic() - began
    unbroken = {"seconds": seconds, "outcome": ended(directory, "unbroken")}
    rng = random.Random(seed * 1000 + world_size)
    results = Results()
    while sum(result["killed"] for result in results.rows) < kills:
        results.add(trial(directory, world_size, len(results.rows), rng, unbroken, start))
    return results.rows


def main() -> int:
    """Run the campaign."""
    options = asked(__doc__, kills=(40, "at each number of processes"), world_sizes=[1, 2], seed=0)
    results = []
    for world_size in options.world_sizes:
        with workplace() as directory:
            results += campaign(directory, world_size, options.kills, options.seed)
    good = sum(r["resumed"] and r["identical"] for r in results)
    killed = sum(r["killed"] for r in results)
    places = Counter(r["at"].split(",")[0] for r in results)
    print(json.dumps({"trials": len(results), "killed": killed, "identical": good, "at": places, "seed": options.seed}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
