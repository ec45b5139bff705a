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
import time
from pathlib import Path
from typing import Any

from tests.fixtures import forked
from tests.fixtures.processes import processes_where
from tests.fixtures.store_proxy import Proxy, proxied
from tests.fixtures.store_servers import Server, serving
from tests.fixtures.trainings import outcome
from tools.commands import Results, asked, environment, say, workplace
from tools.kill_campaign import FLAGS, Place, whole_checkpoints
from tools.store_campaign import orphans
from tools.strikes import POINTS, Network, heard, kill, struck
from tuner.stores.directory import StoreDirectory

LONGEST_S = 240.0
KINDS = ("request", "request", "moment", "faults")
RATES = (0.0, 0.0, 0.02, 0.05, 0.1)


def kill_all(directory: Path) -> None:
    """Kill what works in a directory: the command and its ranks, which are in sessions of their own."""
    kill(processes_where(lambda place: (place / "cwd").readlink() == directory))


class Run:
    """A run in the bucket, struck until it has ended."""

    def __init__(self, place: Place, server: Server, proxy: Proxy, name: str) -> None:
        self.place, self.proxy, self.url, self.ended = place, proxy, server.url(name), False
        self.stage = place.path / "cache" / "stores" / self.url.replace("://", "/")
        self.env = environment(place.path / "cache", PYTHONWARNINGS="ignore", **server.environment(proxy.port))
        self.step, self.launches = -1, 0

    def point(self, seed: int) -> dict[str, Any]:
        """One launch; its row."""
        draw, before = random.Random(seed), self.step
        network, without_stage = Network(self.proxy, draw, KINDS, RATES, 150), draw.random() < 0.25
        if without_stage:
            shutil.rmtree(self.stage, ignore_errors=True)
        with network.around(lambda: kill_all(self.place.path) if network.kind == "request" else None):
            code, said = self._launch(draw.uniform(2, 15) if network.kind == "moment" else LONGEST_S)
        problems = [] if code in (0, 4, -signal.SIGKILL) else [f"exit code {code}: {said}"]
        problems += [f"says: {said}"] if "Traceback" in said or "bug in tuner" in said else []
        problems += self._read(before, code == 0)
        return {
            "run": self.url, "processes": self.place.processes, **network.row(), "without_stage": without_stage,
            "code": code, "step": self.step, "problems": problems, "said": said[-200:] if code == 4 else "",
        }  # fmt: skip

    def _launch(self, seconds: float) -> tuple[int, str]:
        """Train or resume, killed after so many seconds; the exit code and the end of what was said."""
        new = self.step < 0 and not (self.stage / "run.json").is_file()
        begin = ("train", "r.yaml", "--output_dir", self.url, *FLAGS, *self.place.spread())
        until = time.monotonic() + seconds

        def wait(process: Any) -> int:
            while process.poll() is None:
                if time.monotonic() > until:
                    kill_all(self.place.path)
                time.sleep(0.05)
            kill_all(self.place.path)  # ranks whose command was killed
            return int(process.returncode)

        command = [sys.executable, "-m", "tuner", *(begin if new else ("resume", self.url))]
        return heard(forked.Popen, wait, command, cwd=self.place.path, env=self.env)

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
    options = asked(__doc__, **POINTS, processes=([1, 2], "of runs, in turns"))
    results, runs = Results(options.out), list[Run]()
    with workplace() as directory, serving("s3", directory) as server, proxied(server.port, lambda _: None) as proxy:
        os.environ.update(server.environment())
        places = [Place(directory / f"of-{count}", count) for count in options.processes]

        def point(number: int) -> dict[str, Any]:
            if not runs or runs[-1].ended:
                runs.append(Run(places[number % len(places)], server, proxy, f"runs/{number}"))
            return runs[-1].point(number)

        code = struck(options, results, point)
    say(f"{sum(row.get('code') == 0 for row in results.rows)} runs ended")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
