"""Prepare data on a Ray cluster of this machine and hold it against local workers: bytes, killed workers, seconds.

    python -m tools.ray_campaign --out F
    python -m tools.ray_campaign --out F --kills 0 --measure 100 1000 --workers 2

With 1, 2 and 4 workers the files must be those of local ones. Then, build by build, workers are killed with SIGKILL at
random moments, `--each` of them, and the files must still be the same. `--measure` takes megabytes of rows: they are
prepared by local workers and on the cluster, which is up, in turns, and the seconds of each are written down. What is
in F already is not done again. Exits with 1 where files differ.
"""

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.commands import ROOT, Results, parser_of, workplace
from tools.prepare_campaign import contents

WORDS = ["alpha", "beta", "gamma", "the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "at"]
WORKERS = (1, 2, 4)
WORKER_NAMES = (b"ray::tuner.prepare", b"ray::IDLE")
TURNS = 3


def write_rows(directory: Path, megabytes: float, files: int) -> list[str]:
    """Rows of uneven length in so many files."""
    rng, found = random.Random(0), []
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
    return contents(path), time.monotonic() - began


def workers_here() -> Iterator[int]:
    """Process ids of the cluster's workers."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (place / "cmdline").read_bytes().startswith(WORKER_NAMES):
                yield int(place.name)
        except OSError:
            continue


def killing(moments: list[float], rng: random.Random, ended: threading.Event) -> list[int]:
    """Have a thread kill a worker at each moment, in seconds from now, until the build ends; returns who was killed."""
    killed: list[int] = []
    began = time.monotonic()

    def kill() -> None:
        for moment in moments:
            if ended.wait(max(0.0, began + moment - time.monotonic())):
                return
            if there := sorted(workers_here()):
                killed.append(rng.choice(there))
                os.kill(killed[-1], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return killed


def trials(options: Any, place: Path, results: Results) -> None:
    """What is not in the results yet, by the cluster that this process has joined."""
    from tuner.data.building import documents, spec

    done = {(row["kind"], row["number"]) for row in results.rows}
    many = place / "many"
    many.mkdir()
    rows = write_rows(many, 3, 40)
    bundle, documents.BUNDLE_BYTES = documents.BUNDLE_BYTES, 1  # each file is a task of its own
    least, spec.MANY_BYTES = spec.MANY_BYTES, 1
    expected, _ = build(options.model, place / "local", rows, "local", 2)
    took = 0.0
    for workers in WORKERS:
        found, took = build(options.model, place / "ray", rows, "ray", workers)
        if ("equal", workers) not in done:
            results.add({"kind": "equal", "number": workers, "ok": found == expected, "seconds": round(took, 2)})
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
        row = {"kind": "kill", "number": number, "ok": found == expected, "killed": len(killed)}
        results.add({**row, "moments": moments, "seconds": round(took, 2)})
    documents.BUNDLE_BYTES, spec.MANY_BYTES = bundle, least
    for size in options.measure:
        if ("measure", size) in done:
            continue
        large = place / f"{size}"
        large.mkdir()
        rows = write_rows(large, size, 4)
        seconds: dict[str, list[float]] = {"local": [], "ray": []}
        files = []
        for engine in (*seconds, *list(seconds) * TURNS):  # the first turn warms up, and is not counted
            found, took = build(options.model, place / engine, rows, engine, options.workers)
            seconds[engine].append(round(took, 2))
            files.append(found)
        local, ray = (min(each[1:]) for each in seconds.values())
        row = {"kind": "measure", "number": size, "ok": all(each == files[0] for each in files), "seconds": seconds}
        results.add({**row, "workers": options.workers, "overhead": round(ray / local - 1, 4)})
        shutil.rmtree(large)


def main() -> int:
    """Run the campaign."""
    from tuner.runtime.ray_cluster import joined

    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, help="a file of JSON lines, written as it is known, and continued")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--each", type=int, default=1, help="workers killed in a build")
    parser.add_argument("--measure", type=int, nargs="+", default=[], metavar="MB")
    parser.add_argument("--workers", type=int, default=2, help="of the measured builds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=ROOT / ".demo/smollm2")
    options = parser.parse_args()
    results = Results(options.out)
    with workplace() as place, joined(max(*WORKERS, options.workers) if options.kills else options.workers):
        trials(options, place, results)
    return int(not all(row["ok"] for row in results.rows))


if __name__ == "__main__":
    raise SystemExit(main())
