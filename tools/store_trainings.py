"""Trainings whose run lies in a bucket killed and lied to by the network, resumed, and held against an unbroken one.

    python -m tools.store_trainings --points 500 --out trainings.jsonl
    python -m tools.store_trainings --points 50 --first 500 --processes 2 --out more.jsonl

Each point is a launch of `tuner train` or `tuner resume` that speaks to the server through a proxy of faults
(`tests.fixtures.store_proxy.FAULTS`). It is killed (SIGKILL, all of its processes) at one of its requests or at some
moment, or left to the faults; in one of four its stage is removed before it, as on another machine. After each a
reader without faults fetches the run: every checkpoint must be whole, its newest step none before the last that was
read, and the launch must have begun there or later. A run that has ended must have the tensors (SHA-256) and the log of
an unbroken one in a directory, in the stage and in the bucket, with nothing left over; then another is begun. With the
same --out the points that are left are done. Exits with 1 where a point found a problem.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fixtures import forked
from tests.fixtures.store_proxy import FAULTS, Proxy, Request, proxied
from tests.fixtures.store_servers import Server, serving
from tests.fixtures.trainings import outcome
from tools.commands import Results, environment, parser_of, say, workplace
from tools.kill_campaign import FLAGS, Place, whole_checkpoints
from tools.store_campaign import orphans
from tuner.stores.directory import StoreDirectory

LONGEST_S = 240.0
KINDS = ("request", "request", "moment", "faults")
RATES = (0.0, 0.0, 0.02, 0.05, 0.1)


def kill_all(directory: Path) -> None:
    """Kill what works in a directory: the command and its ranks, which are in sessions of their own."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == directory:
                os.kill(int(process.name), signal.SIGKILL)


class Run:
    """A run in the bucket, struck until it has ended."""

    def __init__(self, place: Place, server: Server, proxy: Proxy, name: str) -> None:
        self.place, self.proxy, self.url, self.ended = place, proxy, server.url(name), False
        self.stage = place.path / "cache" / "stores" / self.url.replace("://", "/")
        self.env = environment(place.path / "cache", PYTHONWARNINGS="ignore", **server.environment(proxy.port))
        self.step, self.launches = -1, 0

    def point(self, seed: int) -> dict[str, Any]:
        """One launch; its row."""
        draw = random.Random(seed)
        kind, rate, without_stage = draw.choice(KINDS), draw.choice(RATES), draw.random() < 0.25
        names = draw.sample(sorted(FAULTS), draw.randint(1, len(FAULTS)))
        strike_at, asked, before = draw.randint(1, 150), 0, self.step
        self.proxy.happened.clear()

        def choose(_: Request) -> str | None:
            nonlocal asked
            asked += 1
            if kind == "request" and asked == strike_at:
                kill_all(self.place.path)
            return draw.choice(names) if draw.random() < rate else None

        if without_stage:
            shutil.rmtree(self.stage, ignore_errors=True)
        self.proxy.choose = choose
        code, said = self._launch(draw.uniform(2, 15) if kind == "moment" else LONGEST_S)
        self.proxy.choose = lambda _: None
        self.proxy.settle()
        problems = [] if code in (0, 4, -signal.SIGKILL) else [f"exit code {code}: {said}"]
        problems += [f"says: {said}"] if "Traceback" in said or "bug in tuner" in said else []
        problems += self._read(before, code == 0)
        return {
            "point": seed, "run": self.url, "processes": self.place.processes, "kind": kind, "rate": rate,
            "without_stage": without_stage, "requests": asked, "faults": len(self.proxy.happened), "code": code,
            "step": self.step, "problems": problems, "said": said[-200:] if code == 4 else "",
        }  # fmt: skip

    def _launch(self, seconds: float) -> tuple[int, str]:
        """Train or resume, killed after so many seconds; the exit code and the end of what was said."""
        new = self.step < 0 and not (self.stage / "run.json").is_file()
        begin = ("train", "r.yaml", "--output_dir", self.url, *FLAGS, *self.place.spread())
        command = [sys.executable, "-m", "tuner", *(begin if new else ("resume", self.url))]
        with tempfile.TemporaryFile("w+") as log:
            process = forked.Popen(command, cwd=self.place.path, env=self.env, stdout=log, stderr=log)
            until = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            while process.poll() is None:
                kill_all(self.place.path)
                time.sleep(0.05)
            kill_all(self.place.path)  # ranks whose command was killed
            log.seek(0)
            return process.returncode, log.read()[-1500:]

    def _read(self, before: int, has_ended: bool) -> list[str]:
        """Fetch the run without faults; what is wrong with it."""
        target = self.place.path.parent / "read"
        shutil.rmtree(target, ignore_errors=True)
        commit = StoreDirectory.open(self.url).fetch(target)
        if commit is None:
            return ["nothing is there"] if before >= 0 or has_ended else []
        step, problems = whole_checkpoints(target)
        self.step = -1 if step is None else step
        if self.step < before:
            problems.append(f"step {self.step} is newest, and step {before} was")
        launches = json.loads((target / "run.json").read_text())["launches"]
        if len(launches) > self.launches and launches[-1]["from_step"] < max(before, 0):
            problems.append(f"began at step {launches[-1]['from_step']}, and step {before} was there")
        self.launches = len(launches)
        if has_ended:
            self.ended, unbroken = True, outcome(self.place.path / "runs" / "unbroken")
            problems += [f"{where} ended otherwise" for where in (self.stage, target) if outcome(where) != unbroken]
            problems += orphans(self.url, self.stage)
            shutil.rmtree(self.stage)
        return problems


def main() -> int:
    """Run the campaign."""
    parser = parser_of(__doc__)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the number of the first, for campaigns side by side")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="of runs, in turns")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = Results(options.out)
    points = range(options.first, options.first + options.points)[len(results.rows) :]
    with workplace() as directory, serving("s3", directory) as server, proxied(server.port, lambda _: None) as proxy:
        os.environ.update(server.environment())
        places = [Place(directory / f"of-{count}", count) for count in options.processes]
        run = None
        for point in points:
            if run is None or run.ended:
                run = Run(places[point % len(places)], server, proxy, f"runs/{point}")
            results.add(run.point(point))
    bad = sum(bool(row["problems"]) for row in results.rows)
    say(f"{len(results.rows)} points, {bad} with problems, {sum(row['code'] == 0 for row in results.rows)} runs ended")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
