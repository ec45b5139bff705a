"""Stop training in two processes at random moments, as terminals and schedulers do, and look at what is left.

    python -m tools.signal_campaign --trials 100 --seed 0
    python -m tools.signal_campaign --moments 200 --out moments.jsonl     (tools/signal_moments.py)

Each trial starts `tuner train` with two local processes on a tiny model, waits for the first step and a random time
more, and stops it. The ways: `ctrl-c`, the key in a terminal of its own, which signals the whole foreground group;
`scheduler`, SIGTERM to the command; `step`, SIGTERM to the command and to its ranks at once, as a scheduler ends a job
step; `hangup`, the terminal is closed. A random half of the trials saves beside the steps. Each must exit with 75 in a
minute, leave a valid checkpoint of the last step in its log and no process. Prints one JSON line per trial and a
summary; exits with 1 when a trial fails.
"""

import fcntl
import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fixtures.processes import gone, parent_of, processes_where
from tools.commands import STOPPED, Results, asked, environment, some, workplace
from tools.signal_moments import COMMANDS, moments

WAYS = ("ctrl-c", "scheduler", "step", "hangup")
LONGEST_S = 60.0


class Started:
    """`tuner train` in a terminal of its own, whose group is the foreground's."""

    def __init__(self, directory: Path, name: str, beside: bool) -> None:
        self.run, self.answer = directory / "runs" / name, directory / f"{name}.json"
        self.terminal, inner = pty.openpty()
        words = ["train", "r.yaml", "--json", "--name", name, "--parallel.processes", "2"]
        words += ["--train.duration", "1000000 steps", "--logging.console_every", "0.1 s"]
        words += ["--checkpoint.every", "7 steps", "--checkpoint.async_save", "true" if beside else "false"]

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)

        with self.answer.open("w") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *words],
                cwd=directory,
                env=environment(directory / "cache", PYTHONWARNINGS="ignore"),
                stdin=inner,
                stdout=stdout,
                stderr=inner,
                preexec_fn=own_terminal,  # noqa: PLW1509 - this process has no threads yet that hold a lock
            )
        os.close(inner)
        self.shown: list[bytes] = []
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is gone
            while not self._closing:
                if select.select([self.terminal], [], [], 0.1)[0]:
                    self.shown.append(os.read(self.terminal, 1 << 16))

    def close(self) -> None:
        """Close the terminal; whoever still lives in it hears SIGHUP and cannot write there any more."""
        if not self._closing:
            self._closing = True
            self._reader.join()
            os.close(self.terminal)

    def ranks(self) -> list[int]:
        """Process ids of the command's children."""
        return processes_where(lambda place: parent_of(place) == self.process.pid)

    def stop(self, way: str) -> None:
        """Stop it in one of the ways."""
        if way == "ctrl-c":
            os.write(self.terminal, b"\x03")
        elif way == "hangup":
            self.close()
        else:
            targets = [self.process.pid, *(self.ranks() if way == "step" else [])]
            for target in targets:
                os.kill(target, signal.SIGTERM)


def wait_for_steps(started: Started) -> None:
    """Until the first step is in the log."""
    log = started.run / "metrics.jsonl"
    while not (log.is_file() and log.stat().st_size):
        if started.process.poll() is not None:
            raise RuntimeError(b"".join(started.shown).decode(errors="replace")[-2000:])
        time.sleep(0.02)


def trial(directory: Path, number: int, way: str, rng: random.Random) -> dict[str, Any]:
    """One start and stop."""
    from tuner.checkpoint.open import newest

    started = Started(directory, f"t{number}", beside=rng.random() < 0.5)
    wait_for_steps(started)
    ranks = started.ranks()
    pause = rng.uniform(0.0, 1.5)
    time.sleep(pause)
    began = time.monotonic()
    started.stop(way)
    try:
        code: int | None = started.process.wait(LONGEST_S)
    except subprocess.TimeoutExpired:
        code = None
        started.process.kill()
    took = time.monotonic() - began
    started.close()
    warned: list[str] = []
    found = newest(started.run / "checkpoints", warned.append)
    last = json.loads((started.run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    document = json.loads(started.answer.read_text() or "{}") if code is not None else {}
    told = (document.get("metrics") or {}).get("step")
    left = [pid for pid in ranks if not gone(pid)]
    step = None if found is None else found.step
    good = code == STOPPED and step == last == told and not warned and not left
    if good:
        shutil.rmtree(started.run)
    return {
        "trial": number, "way": way, "pause_s": round(pause, 3), "code": code, "checkpoint": step, "last_step": last,
        "told": told, "invalid": warned, "left_running": left, "seconds": round(took, 2), "good": good,
    }  # fmt: skip


def campaign(trials: int, seed: int, ways: tuple[str, ...] = WAYS) -> list[dict[str, Any]]:
    """All trials, the ways in turns."""
    from tests.fixtures.trainings import prepare

    rng, results = random.Random(seed), Results()
    with workplace() as place:
        prepare(place, 1)
        for number in range(trials):
            results.add(trial(place, number, ways[number % len(ways)], rng))
    return results.rows


def main() -> int:
    """Run the campaign."""
    options = asked(
        __doc__, trials=100, seed=0, ways=some(WAYS),
        moments=(int, "in place of these: moments from tuner's own first line on"),
        commands=(some(COMMANDS), "that moments are of"),
        out=(Path, "a file with a line for each moment, with which a campaign goes on"),
    )
    if options.moments is not None:
        with workplace() as place:
            results = moments(place, options.moments, options.seed, options.out, tuple(options.commands))
    else:
        results = campaign(options.trials, options.seed, tuple(options.ways))
    good = sum(result["good"] for result in results)
    slowest = max(result["seconds"] for result in results)
    print(json.dumps({"trials": len(results), "good": good, "slowest_s": slowest, "seed": options.seed}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
