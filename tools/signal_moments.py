"""Send a stop signal to a command at any moment from tuner's own first line on, and look at what it says and leaves.

    python -m tools.signal_campaign --moments 200 --out moments.jsonl

The commands are `train`, in one process and in two, `resume`, `export-hf` and `prepare-data`, on a tiny model. A
moment is drawn from the first ten seconds after tuner's first line; every fourth from the first two, in which
libraries load, and every fourth from twice the time that the first steps need, on a slow machine more than ten; for
what ends by itself, from the time that it takes where that is less. SIGINT goes to the whole group, as a terminal
sends it, SIGTERM to the command, as a scheduler does. It must end in a minute: with 75 and a valid checkpoint, with
130 where there is none, or with 0 where it was done. No traceback, no "bug in tuner", no process that lives on,
nothing left in the directory for temporary files, in the cache, or beside an export.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fixtures.processes import gone, of_variable, processes_where
from tools.commands import ROOT, Results, environment
from tools.strikes import kill

FIRST_S, LOADING_S, LONGEST_S = 10.0, 2.0, 60.0
FOR_EVER = "1000000 steps"
COMMANDS = ("train", "export-hf", "train-2", "prepare-data", "resume")
WRONG = ("Traceback", "bug in tuner", "core dumped", "is missing", "partially initialized", "Exception ignored")
TRAINS = ("train", "train-2", "resume")
TRIAL = "SIGNAL_TRIAL"
# Python runs a module of this name before everything else: it tells when tuner's first line is about to run.
HOOK = """
import os, sys
told = os.environ.pop("SIGNAL_TOLD", None)
def hook(event, given):
    global told
    if event == "exec" and told is not None and given[0].co_filename == %r:
        os.write(int(told), b"x")
        told = None
if told is not None:
    sys.addaudithook(hook)
"""


@dataclass
class Place:
    """A directory with inputs, a finished run to export and one to resume."""

    path: Path
    takes_s: dict[str, float] = field(default_factory=dict)
    """How long a command takes from tuner's first line to its end, or to some steps after the first."""

    def set_up(self) -> None:
        """Write the inputs and train what is exported and resumed."""
        from tests.fixtures.trainings import prepare

        (self.path / "hook").mkdir()
        (self.path / "hook" / "sitecustomize.py").write_text(HOOK % str(ROOT / "tuner" / "__init__.py"))
        prepare(self.path, 1)
        rows = (self.path / "rows.jsonl").read_text()
        (self.path / "many.jsonl").write_text(rows * 400)
        for name, duration in (("done", "5 steps"), ("begun", FOR_EVER)):
            words = ["train", "r.yaml", "--name", name, "--train.stop_after", "4 steps", "--train.duration", duration]
            done = Started(self, words, "set-up")
            if done.ended(LONGEST_S * 5) != 75:
                raise RuntimeError(done.said())
        self.takes_s |= dict.fromkeys(TRAINS, 2 * (time.monotonic() - done.began))

    def words(self, command: str, name: str) -> list[str]:
        """The command line of a trial, which makes what has its name."""
        more = ["--logging.console_every", "1 s", "--checkpoint.every", "20 steps"]
        processes = "2" if command == "train-2" else "1"
        match command:
            case "train" | "train-2":
                return ["train", "r.yaml", "--json", "--name", name, "--parallel.processes", processes, *more,
                        "--train.duration", FOR_EVER]  # fmt: skip
            case "resume":
                shutil.copytree(self.path / "runs" / "begun", self.path / "runs" / name)
                return ["resume", f"runs/{name}", "--json", *more]
            case "export-hf":
                return ["export-hf", "runs/done", "--json", "--output", f"out/{name}/export"]
        return ["prepare-data", "r.yaml", "--json", "--data.train", "many.jsonl", "--data.workers", "2"]


def _heeds_all() -> None:
    """Where the campaign itself is a shell's background job, it ignores SIGINT and SIGHUP, and so would the command."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Started:
    """A command in a session of its own, with a cache and a directory for temporary files of its own."""

    def __init__(self, place: Place, words: list[str], trial: str, cache: str = "cache") -> None:
        self.temporary, self.cache = place.path / f"tmp-{trial}", place.path / cache
        self.temporary.mkdir(exist_ok=True)
        self.answer, self.stderr = place.path / f"{trial}.json", place.path / f"{trial}.log"
        self.trial = f"{place.path.name}-{trial}"
        told, tells = os.pipe()
        own = {"PYTHONPATH": f"{place.path / 'hook'}{os.pathsep}{ROOT}", "TMPDIR": str(self.temporary)}
        told_by = {"SIGNAL_TOLD": str(tells), TRIAL: self.trial}
        env = {**environment(self.cache, HF_HUB_OFFLINE="1"), **own, **told_by}
        with self.answer.open("w") as out, self.stderr.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tuner", *words], cwd=place.path, env=env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, pass_fds=[tells], start_new_session=True, preexec_fn=_heeds_all,  # noqa: PLW1509 - one thread
            )  # fmt: skip
        os.close(tells)
        with os.fdopen(told, "rb") as pipe:
            pipe.read(1)
        self.began = time.monotonic()

    def ended(self, longest_s: float) -> int | None:
        """Its exit code, once it ends; None where it does not."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(longest_s)
        return None

    def said(self) -> str:
        """What it wrote to stderr."""
        return self.stderr.read_text(errors="replace")

    def stop(self, number: signal.Signals) -> None:
        """Send the signal as terminals and schedulers do."""
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)

    def living(self) -> list[int]:
        """Processes that it started and that still run, by a variable in their environment."""
        return [pid for pid in processes_where(of_variable(TRIAL, self.trial)) if not gone(pid)]

    def left(self, wait_s: float = 5.0) -> list[str]:
        """What it leaves behind: processes, temporary files, half of a cache's directory or of an export."""
        deadline = time.monotonic() + wait_s  # workers of a pool end by themselves, when their sockets close
        while (living := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"process {pid}" for pid in living] + [str(path) for path in self.temporary.iterdir()]
        kill(living)
        return found


def trial(place: Place, number: int, command: str, sent: signal.Signals, rng: random.Random) -> dict[str, Any]:
    """One start and one signal."""
    takes_s = place.takes_s[command]
    drawn_s = {0: LOADING_S, 1: takes_s}.get(number % 4, FIRST_S)
    moment = rng.uniform(0.0, drawn_s if command in TRAINS else min(drawn_s, takes_s))
    name, cache = f"t{number}", f"cache-{number}" if command == "prepare-data" else "cache"
    started = Started(place, place.words(command, name), name, cache)
    time.sleep(max(0.0, started.began + moment - time.monotonic()))
    saves = (place.path / "runs" / name / "metrics.jsonl").is_file()
    phase = "training" if saves and command != "resume" else started.said().strip().rpartition("\n")[2][:60]
    started.stop(sent)
    sent_s = time.monotonic()
    code = started.ended(LONGEST_S)
    took = time.monotonic() - sent_s
    problems = _problems(place, started, command, name, code)
    result = {
        "trial": number, "command": command, "signal": sent.name, "moment_s": round(moment, 3), "phase": phase,
        "code": code, "seconds": round(took, 2), "problems": problems, "good": not problems,
    }  # fmt: skip
    if problems:
        result["said"] = started.said()[-1500:]
    for path in (place.path / "runs" / name, place.path / "out" / name, started.temporary):
        shutil.rmtree(path, ignore_errors=True)
    if cache != "cache":
        shutil.rmtree(started.cache, ignore_errors=True)
    started.answer.unlink()
    started.stderr.unlink()
    return result


def _problems(place: Place, started: Started, command: str, name: str, code: int | None) -> list[str]:
    """What is wrong with how a command ended after a signal."""
    found = [f"says {words!r}" for words in WRONG if words in started.said()]
    found += [f"left: {what}" for what in started.left()]
    answer = started.answer.read_text()
    if code is None:
        started.process.kill()
        return [*found, "does not end"]
    trains = command in TRAINS
    if code not in ((75, 130) if trains else (0, 130)):
        found.append(f"exit code {code}")
    if (json.loads(answer)["exit_code"] if answer else code) != code or (not answer and code != 130):
        found.append(f"exit code {code}, but the document: {answer or None}")
    if trains:
        return found + _run_problems(place.path / "runs" / name, command, code, answer)
    halves = [path for pattern in (".tmp-*", ".trash-*") for path in started.cache.rglob(pattern)]
    halves += (place.path / "out" / name).glob(".*")
    found += [f"half made: {path}" for path in halves]
    export = place.path / "out" / name / "export"
    if export.is_dir() and not (export / "tuner.json").is_file():
        found.append("half an export has its final name")
    return found


def _run_problems(run: Path, command: str, code: int, answer: str) -> list[str]:
    """What is wrong with the run that a training left: with a checkpoint it ends with 75 and names it.

    `resume` ends with 130 as long as it has not looked at its run.
    """
    from tuner.checkpoint.open import newest

    warned: list[str] = []
    found = newest(run / "checkpoints", warned.append)
    problems = [f"invalid: {text}" for text in warned]
    told = (json.loads(answer or "{}").get("metrics") or {}).get("step")
    if code == 75 and (found is None or found.step != told):
        problems.append(f"the checkpoint is of step {found and found.step}, the document says {told}")
    if code == 130 and found is not None and command != "resume":
        problems.append(f"ends with 130 though step {found.step} is saved")
    return problems


def moments(
    place: Path, trials: int, seed: int, out: Path | None, commands: tuple[str, ...] = COMMANDS
) -> list[dict[str, Any]]:
    """All trials, the commands in turns; those that `out` holds already are not done again."""
    results = Results(out)
    known = {result["trial"] for result in results.rows}
    at = Place(place)
    at.set_up()
    for command in [name for name in commands if name not in TRAINS]:
        whole = Started(at, at.words(command, f"whole-{command}"), "whole", f"cache-{command}")
        if whole.ended(LONGEST_S * 5) != 0:
            raise RuntimeError(whole.said())
        at.takes_s[command] = time.monotonic() - whole.began
    for number in range(trials):
        if number in known:
            continue
        command = commands[number % len(commands)]
        sent = (signal.SIGINT, signal.SIGTERM)[number // len(commands) % 2]
        results.add(trial(at, number, command, sent, random.Random(seed * 100_003 + number)))
    return results.rows
