"""Prepare data on a Ray cluster of this machine and hold it against local workers: bytes, killed workers, seconds.

    python -m tools.ray_campaign --out F
    python -m tools.ray_campaign --out F --kills 0 --measure 100 1000 --workers 2

With 1, 2 and 4 workers the files must be those of local ones. Then, build by build, workers are killed with SIGKILL at
random moments, `--each` of them, and the files must still be the same. `--measure` takes megabytes of rows: they are
prepared by local workers and on the cluster, which is up, in turns, and the seconds of each are written down. What is
in F already is not done again. Exits with 1 where files differ.
"""

import json
import random
import shutil
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.ray_cluster import ray_workers
from tools.commands import ROOT, Results, asked, workplace
from tools.measures import alternated
from tools.prepare_campaign import contents
from tools.strikes import kill

WORDS = ["alpha", "beta", "gamma", "the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "at"]
WORKERS = (1, 2, 4)
ENGINES = ("local", "ray")
TURNS = 3


def write_rows(directory: Path, megabytes: float, files: int) -> list[str]:
    """Rows of uneven length in so many files of a new directory."""
    rng, found = random.Random(0), []
    directory.mkdir()
    for number in range(files):
        found.append(directory / f"rows{number:03}.jsonl")
        with found[-1].open("w") as file:
            while file.tell() < megabytes * 1e6 / files:
                texts = (" ".join(rng.choices(WORDS, k=rng.randint(5, 120))) for _ in range(2))
                file.write(json.dumps(dict(zip(("prompt", "completion"), texts, strict=True))) + "\n")
    return [str(path) for path in found]


def build(model: Path, cache: Path, rows: list[str], engine: str, workers: int) -> tuple[dict[str, str], float]:
    """Prepare rows; the SHA-256 of each file, and the seconds it took. Tokenizers that are cached stay."""
    from tuner.config.load import load_recipe
    from tuner.data.building.prepare import prepare
    from tuner.data.building.spec import prepare_spec

    for level in ("encoded", "prepared"):
        shutil.rmtree(cache / level, ignore_errors=True)
    data = {"train": rows, "eval": "5%", "max_length": 512, "engine": engine, "workers": workers}
    recipe = load_recipe({"model": {"name_or_path": str(model)}, "data": {**data, "cache_dir": str(cache)}}).recipe
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    began = time.monotonic()
    path = prepare(spec).path
    return contents(path), round(time.monotonic() - began, 2)


def killing(moments: list[float], rng: random.Random, ended: threading.Event) -> list[int]:
    """Have a thread kill a worker at each moment, in seconds from now, until the build ends; returns who was killed."""
    killed: list[int] = []
    began = time.monotonic()

    def strike() -> None:
        for moment in moments:
            if ended.wait(max(0.0, began + moment - time.monotonic())):
                return
            if there := sorted(ray_workers("tuner.prepare") + ray_workers("IDLE")):
                killed.append(rng.choice(there))
                kill(killed[-1:])

    threading.Thread(target=strike, daemon=True).start()
    return killed


def trials(options: Any, place: Path, results: Results) -> None:
    """What is not in the results yet, by the cluster that this process has joined."""
    from tuner.data.building import documents, spec

    def add(kind: str, number: int, files: Sequence[Any], **more: Any) -> None:
        results.add({"kind": kind, "number": number, "ok": all(each == files[0] for each in files), **more})

    done = {(row["kind"], row["number"]) for row in results.rows}
    rows = write_rows(place / "many", 3, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BUNDLE_BYTES", 1)  # each file is a task of its own
        patch.setattr(spec, "MANY_BYTES", 1)
        expected, _ = build(options.model, place / "local", rows, "local", 2)
        took = 0.0
        for workers in WORKERS:
            found, took = build(options.model, place / "ray", rows, "ray", workers)
            if ("equal", workers) not in done:
                add("equal", workers, (expected, found), seconds=took)
        number = 0
        while sum(row["killed"] for row in results.rows if row["kind"] == "kill") < options.kills:
            number += 1
            if ("kill", number) in done:
                continue
            rng, ended = random.Random(f"{options.seed} {number}"), threading.Event()
            moments = sorted(round(rng.uniform(0, took), 3) for _ in range(options.each))
            killed = killing(moments, rng, ended)
            found, took = build(options.model, place / "ray", rows, "ray", 2)
            ended.set()
            add("kill", number, (expected, found), killed=len(killed), moments=moments, seconds=took)
    for size in (size for size in options.measure if ("measure", size) not in done):
        rows = write_rows(place / f"{size}", size, 4)
        ways = {name: partial(build, options.model, place / name, rows, name, options.workers) for name in ENGINES}
        taken = alternated(ways, 1 + TURNS)  # the first turn warms up, and is not counted
        seconds = {name: [took for _, took in turns] for name, turns in taken.items()}
        local, ray = (min(each[1:]) for each in seconds.values())
        files = [files for turns in taken.values() for files, _ in turns]
        add("measure", size, files, seconds=seconds, workers=options.workers, overhead=round(ray / local - 1, 4))
        shutil.rmtree(place / f"{size}")


def main() -> int:
    """Run the campaign."""
    from tuner.runtime.ray_cluster import joined

    options = asked(
        __doc__, out=(Path, "a file of JSON lines, written as it is known, and continued"), kills=50,
        each=(1, "workers killed in a build"), measure={"type": int, "nargs": "+", "default": [], "metavar": "MB"},
        workers=(2, "of the measured builds"), seed=0, model=ROOT / ".demo/smollm2",
    )
    results = Results(options.out)
    with workplace() as place, joined(max(*WORKERS, options.workers) if options.kills else options.workers):
        trials(options, place, results)
    return int(not all(row["ok"] for row in results.rows))


if __name__ == "__main__":
    raise SystemExit(main())
