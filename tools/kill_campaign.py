"""Kill training, uploads and readers of compressed files where calls of the system do not tell, and go on from there.

    python -m tools.kill_campaign --count 8 --out kills.jsonl
    python -m tools.kill_campaign --points evaluation save --processes 2 4 --count 20
    python -m tools.kill_campaign --points step --flags --optimizer.offload host --checkpoint.async_save true

Points of training, with one, two and four processes: `evaluation`, before one of its forwards; `save`, at a call of a
save beside the steps; `signal`, SIGTERM to the command in such a save or in one that steps wait for; `clock`, killed
after the clock jumped; `step`, killed in place of one; `fewer`, four processes killed and two that resume. All ranks or
one alone die. The newest checkpoint must be valid and the last that was committed, and the resumed run must end with
the tensors (SHA-256) and the log of an unbroken one; with fewer processes, with its losses to 1e-5. `push`: an upload
is killed at any request and in the midst of a file, and is done again; the hub holds nothing or all of it, the export
stays as it is. `cut`: a gzip or Zstandard file that ends anywhere ends with exit code 3 and its name, and nothing is
prepared. Prints a line of JSON for each trial; exits with 1 where one failed. What follows ``--flags`` is given to
every run of the first ones.
"""

import argparse
import gzip
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fixtures import forked
from tests.fixtures.fake_hub import Hub, serving
from tests.fixtures.trainings import outcome, prepare
from tools.commands import ROOT, Results, asked, environment, some, workplace
from tools.strikes import heard
from tools.struck import VARIABLE

TRAINING = ("evaluation", "save", "signal", "clock", "step")
POINTS = (*TRAINING, "fewer", "push", "cut")
STEPS, LONGEST_S = 8, 180.0
MOMENTS = {"evaluation": 200, "save": 120, "signal": 120}
"""Forwards and calls among which one is drawn: about as many as a rank makes."""
JUMPS_S = (-3600, 3600, -(10**8), 10**9)
FLAGS = (
    "--train.duration", f"{STEPS} steps", "--checkpoint.every", "1 steps", "--data.eval", "7 documents", "--eval.every",
    "1 steps", "--eval.samples", "1", "--eval.samples_at", "all", "--parallel.timeout", "30 s",
)  # fmt: skip
Result = dict[str, Any]


class Place:
    """A directory for trainings with so many processes, and what an unbroken one comes to."""

    def __init__(self, path: Path, processes: int, *flags: str) -> None:
        self.path, self.processes, self.flags = path, processes, (*FLAGS, *flags)
        path.mkdir()
        prepare(path, processes)
        (path / "hook").mkdir()
        (path / "hook" / "sitecustomize.py").write_text("from tools.struck import arm\narm()\n")
        code, said = self.tuner("train", "r.yaml", "--name", "unbroken", *self.flags, *self.spread())
        if code:
            raise RuntimeError(said)
        self.unbroken = outcome(path / "runs" / "unbroken")

    def spread(self) -> tuple[str, str]:
        """The flag for the processes of a run."""
        return ("--parallel.processes", str(self.processes))

    def tuner(self, *words: str, struck: dict[str, Any] | None = None) -> tuple[int | None, str]:
        """Run a command, struck where that is asked for; its exit code, and the end of what it said."""
        paths = os.pathsep.join((str(self.path / "hook"), str(ROOT)))
        env = environment(self.path / "cache", PYTHONPATH=paths, PYTHONWARNINGS="ignore")
        env[VARIABLE] = json.dumps(struck)

        def wait(process: Any) -> int | None:
            with suppress(subprocess.TimeoutExpired):
                return int(process.wait(LONGEST_S))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None

        command = [sys.executable, "-m", "tuner", *words]
        return heard(forked.Popen, wait, command, cwd=self.path, env=env, start_new_session=True)


def training_trial(place: Place, point: str, number: int, rng: random.Random, resumed_by: int = 0) -> Result:
    """Strike a training, look at what is left, resume it and hold the end against an unbroken run."""
    rank = rng.choice([-1, *range(place.processes)])
    if point == "signal":
        rank = rng.randrange(place.processes)
    at = rng.randint(1, MOMENTS.get(point, STEPS - 2))
    struck = {"point": point, "rank": rank, "at": at, "jump": rng.choice(JUMPS_S) if point == "clock" else 0}
    beside = point == "save" or (point == "signal" and rng.random() < 0.5)
    name = f"{point}-{number}"
    run = place.path / "runs" / name
    async_save = ("--checkpoint.async_save", str(beside).lower()) if point != "step" else ()
    words = ("train", "r.yaml", "--name", name, *place.flags, *place.spread())
    code, said = place.tuner(*words, *async_save, struck=struck)
    expected = {0, 75} if point == "signal" else {0, 4, -signal.SIGKILL, 128 + signal.SIGKILL}
    problems = [] if code in expected else [f"exit code {code}: {said}"]
    if "Traceback" in said or "bug in tuner" in said:
        problems.append(f"says: {said}")
    newest_step, found = whole_checkpoints(run)
    problems += found
    fewer = ("--parallel.processes", str(resumed_by)) if resumed_by else ()
    again = ("resume", f"runs/{name}") if (run / "run.json").is_file() else words
    resumed, said = place.tuner(*again, *fewer)
    if resumed != 0:
        problems.append(f"resumed with exit code {resumed}: {said}")
    else:
        problems += _end_problems(place, run, newest_step, bool(resumed_by))
    shutil.rmtree(run, ignore_errors=True)
    return {
        "point": point, "processes": place.processes, "trial": number, "struck": struck, "beside": beside, "code": code,
        "hit": code not in (0, None), "checkpoint": newest_step, "problems": problems, "good": not problems,
    }  # fmt: skip


def whole_checkpoints(run: Path) -> tuple[int | None, list[str]]:
    """The newest step that is saved, and what of the checkpoints is torn: each has its final name once it is whole."""
    from tuner.checkpoint.manifest import step_dirs
    from tuner.checkpoint.open import open_checkpoint
    from tuner.errors import DataError

    steps, problems = step_dirs(run / "checkpoints"), []
    for _, path in steps:
        try:
            open_checkpoint(path)
        except DataError as error:
            problems.append(f"torn: {error.message}")
    return (steps[0][0] if steps else None), problems


def _end_problems(place: Place, run: Path, newest_step: int | None, is_other: bool) -> list[str]:
    record = json.loads((run / "run.json").read_text())
    from_step = record["launches"][-1]["from_step"]
    problems = [f"left over: {path}" for pattern in (".tmp-*", ".trash-*") for path in run.rglob(pattern)]
    if newest_step is not None and len(record["launches"]) > 1 and from_step < newest_step:
        problems.append(f"lost: step {newest_step} was saved, resumed from {from_step}")
    ended = outcome(run)
    if not is_other:
        return problems + ([] if ended == place.unbroken and ended["log"] else ["differs from an unbroken run"])
    logs = [[line for line in each["log"] if line["kind"] == "train"] for each in (ended, place.unbroken)]
    same = len(logs[0]) == len(logs[1]) and all(
        (a["step"], a["epoch"], a["tokens"]) == (b["step"], b["epoch"], b["tokens"])
        and math.isclose(a["loss"], b["loss"], rel_tol=1e-5)
        for a, b in zip(*logs, strict=True)
    )
    return problems + ([] if same else ["the log differs from that of an unbroken run"])


def push_trials(place: Place, trials: Mapping[int, random.Random]) -> Iterator[Result]:
    """Uploads of an export that are killed when the hub has heard so many requests and parts of files, and again."""
    if not trials:
        return
    code, said = place.tuner("export-hf", "runs/unbroken")
    if code:
        raise RuntimeError(said)
    export = next((place.path / "runs" / "unbroken" / "exports").glob("step-*"))
    before = {path: path.read_bytes() for path in export.rglob("*") if path.is_file()}
    whole, heard = _pushed(place, export, 0)
    for number, rng in trials.items():
        at = rng.randint(1, heard)
        hub, _ = _pushed(place, export, at)
        there = {name: facts["size"] for name, facts in hub.files.items()}
        everything = {name: facts["size"] for name, facts in whole.files.items()}
        problems = [] if there in ({}, everything) else [f"the hub holds a part: {sorted(there)}"]
        code, said = _push(place, export, hub)
        problems += [] if code == 0 else [f"pushed again with exit code {code}: {said}"]
        problems += [] if hub.files == whole.files else ["the hub holds something else after the second upload"]
        changed = {path: path.read_bytes() for path in export.rglob("*") if path.is_file()} != before
        problems += ["the export has changed"] if changed else []
        yield {"point": "push", "trial": number, "at": at, "of": heard, "problems": problems, "good": not problems}


def _pushed(place: Place, export: Path, at: int) -> tuple[Hub, int]:
    """The hub after an upload that is killed when it has heard so much, or never; and how much it heard."""
    hub, heard = Hub(), [0]
    pids: list[int] = []

    def hear(_: str) -> None:
        heard[0] += 1
        if heard[0] == at and pids:
            os.kill(pids[0], signal.SIGKILL)
            time.sleep(0.05)

    hub.heard = hear
    code, said = _push(place, export, hub, pids)
    if code != (0 if not at else -signal.SIGKILL):
        raise RuntimeError(f"{code}: {said}")
    hub.heard = lambda _: None
    return hub, heard[0]


def _push(place: Place, export: Path, hub: Hub, pids: list[int] | None = None) -> tuple[int, str]:
    def wait(process: Any) -> int:
        if pids is not None:
            pids.append(process.pid)
        return int(process.wait(LONGEST_S))

    with serving(hub):
        of_hub = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_secret", "HF_HOME": str(place.path / "hf")}
        online = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "PYTHONWARNINGS": "ignore"}
        env = {**environment(threads=None), **of_hub, **online}
        words = [sys.executable, "-m", "tuner", "push", str(export), "me/model"]
        return heard(forked.Plain, wait, words, cwd=place.path, env=env)


def cut_trials(place: Place, trials: Mapping[int, random.Random]) -> Iterator[Result]:
    """Compressed sources that end anywhere: refused by name, and nothing is prepared from them."""
    import pyarrow as pa

    rows = (place.path / "rows.jsonl").read_bytes() * 20
    packed = {"gz": gzip.compress(rows, mtime=0), "zst": pa.compress(rows, codec="zstd", asbytes=True)}
    for number, rng in trials.items():
        kind = ("gz", "zst")[number % 2]
        size = rng.randint(1, len(packed[kind]) - 1)
        source, cache = place.path / f"cut-{number}.jsonl.{kind}", place.path / f"cache-cut-{number}"
        source.write_bytes(packed[kind][:size])
        words = ("prepare-data", "r.yaml", "--data.train", source.name, "--data.cache_dir", str(cache))
        code, said = place.tuner(*words)
        problems = [] if code == 3 and source.name in said else [f"exit code {code}: {said}"]
        problems += ["says a traceback"] if "Traceback" in said or "bug in tuner" in said else []
        made = [path for level in ("prepared", "encoded") for path in (cache / level).glob("[!.]*")]
        problems += [f"prepared: {path}" for path in made]
        source.write_bytes(packed[kind])
        code, said = place.tuner(*words)
        problems += [] if code == 0 else [f"whole again, exit code {code}: {said}"]
        shutil.rmtree(cache, ignore_errors=True)
        source.unlink()
        yield {
            "point": "cut", "trial": number, "kind": kind, "bytes": size, "problems": problems, "good": not problems,
        }  # fmt: skip


def campaign(
    directory: Path,
    points: list[str],
    processes: list[int],
    count: int,
    seed: int,
    known: Sequence[Result] = (),
    flags: Sequence[str] = (),
) -> Iterator[Result]:
    """All trials of these points, so many for each and each number of processes, but for those that are known."""
    done = {(each["point"], each.get("processes", 1), each["trial"]) for each in known}

    def left(point: str, number: int) -> list[int]:
        return [trial for trial in range(count) if point in points and (point, number, trial) not in done]

    def rng(point: str, number: int, trial: int) -> random.Random:
        return random.Random(f"{seed} {point} {number} {trial}")

    for number in processes:
        if trials := sorted((trial, point) for point in TRAINING for trial in left(point, number)):
            place = Place(directory / f"of-{number}", number, *flags)
            for trial, point in trials:
                yield training_trial(place, point, trial, rng(point, number, trial))
    if resumed := left("fewer", 4):
        place = Place(directory / "fewer", 4, "--adapter.dropout", "0")  # which elements are left out follows the mesh
        for trial in resumed:
            yield training_trial(place, "fewer", trial, rng("fewer", 4, trial), resumed_by=2)
    pushes, cuts = left("push", 1), left("cut", 1)
    if pushes or cuts:
        place = Place(directory / "alone", 1)
        yield from push_trials(place, {trial: rng("push", 1, trial) for trial in pushes})
        yield from cut_trials(place, {trial: rng("cut", 1, trial) for trial in cuts})


def main() -> int:
    """Run the campaign."""
    options = asked(
        __doc__, points=some(POINTS), processes=[1, 2, 4],
        count=(8, "trials of each point, with each number of processes"), seed=0,
        out=(Path, "a file with a line for each trial, with which a campaign goes on"),
        flags=({"nargs": argparse.REMAINDER, "default": []}, "of `tuner train`, the last option here"),
    )

    told = Results(options.out)
    with workplace() as place:
        given = (place, options.points, options.processes, options.count, options.seed, [*told.rows], options.flags)
        for result in campaign(*given):
            told.add(result)
    results = told.rows
    good, problems = sum(result["good"] for result in results), [text for r in results for text in r["problems"]]
    struck = sum(result.get("hit", True) for result in results)
    counts = {word: sum(text.startswith(word) for text in problems) for word in ("torn", "lost")}
    print(json.dumps({"trials": len(results), "good": good, "struck": struck, **counts, "seed": options.seed}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
