"""Train over six windows of data, one late, one empty and one damaged, killed in every phase, against an unbroken run.

    python -m tools.windows_campaign
    python -m tools.windows_campaign --phases train wait --world-sizes 1

One run per world size has all windows there, but for the empty one, and is not interrupted. Each trial has window 4 put
into its place only once training waits for it, and window 5 cut off until the run has refused it with exit code 3 by
its name and was resumed; and it dies of SIGKILL in one phase: while a window is prepared (before any step, or next to
training), in a step, an evaluation, a save (before and after its commit), after a window was opened, while one is
waited for, or at the very end. It must end with the same tensors (SHA-256) and the same log, with each document trained
once.
`stream` goes over the windows twice, each with held-out rows of its own, four windows a launch, in runs that are killed
40 times, in phases that are drawn. `bank` kills runs, 24 times in all, that take newer weights of another run at the
bounds of windows and every three steps while that one trains and saves; each is held against a run that is not killed
and has the same versions in the same steps. Prints a JSON line for each, and exits with 1 where one differs. With
`--out` the runs of `bank` are written there as they end, and those that it holds count.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.fixtures import trainings
from tools.commands import Results, Start, asked, environment, read_lines, say, some, workplace, write_lines

RECIPE = Path(__file__).with_suffix(".yaml")
ROWS = {"w1": 12, "w2": 8, "w3": 0, "w4": 16, "w5": 8, "w6": 12}
"""Rows of each window; whole global batches, so that a plain run has the same steps."""
LATE, DAMAGED = "w4", "w5"
STOPPED, KILLS, BANK_KILLS = 75, 40, 24
STREAM = [
    "--data.windows.passes", "stream", "--train.duration", "2 epochs", "--data.eval", "held/{window}.jsonl",
    "--data.windows.save_every", "2", "--data.windows.per_launch", "4",
]  # fmt: skip
SOURCE = ["--checkpoint.every", "1 step", "--checkpoint.keep", "99"]
GIVEN = {"load": ["mlp", "self_attn"], "every": ["1 window", "3 steps"]}
FROZEN = ["--model.freeze", '["self_attn"]', "--checkpoint.keep", "99"]

# Notes what each step trains, and dies at the given call of a function, before or after what it does.
PROGRAM = """
import importlib, json, os, signal, sys
import tuner.train.loop as loop
log, module, name, nth, when = sys.argv[1:6]
step = loop.optimizer_step
def noting(state, index, batches, factor):
    texts = []
    for batch in batches.micro:
        start = 0
        for length in batch.lengths:
            texts.append(batch.input_ids[start:start + length].tolist())
            start += length
    with open(log, "a") as file:
        file.write(json.dumps({"step": index, "documents": texts}) + "\\n")
    return step(state, index, batches, factor)
loop.optimizer_step = noting
if module:
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), 0
    def dying(*given, **named):
        global calls
        calls += 1
        if calls == int(nth) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*given, **named)
        if calls == int(nth) and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, last, dying)
from tuner.cli.main import main
main(sys.argv[6:])
"""


@dataclass(frozen=True)
class Phase:
    """Where a run is killed: at the nth call of a function, before or after what it does."""

    module: str = ""
    name: str = ""
    nth: int = 1
    when: str = "before"

    @property
    def words(self) -> list[str]:
        """The program's arguments."""
        return [self.module, self.name, str(self.nth), self.when]


PHASES = {
    "prepare": Phase("tuner.data.building.cache", "publish_dir", 2),  # of the first window: its rows are built
    "beside": Phase("tuner.run.windows.finder", "PreparedBeside.start", 2, "after"),
    "train": Phase("tuner.train.loop", "optimizer_step", 4),
    "evaluate": Phase("tuner.run.tasks.evaluate", "evaluate", 3),
    "save": Phase("tuner.run.tasks.save", "save", 3),
    "saved": Phase("tuner.run.tasks.save", "save", 3, "after"),
    "open": Phase("tuner.run.tasks.windows", "write_windows", 1, "after"),
    "wait": Phase("tuner.run.windows.finder", "Finder._late", 8),
    "end": Phase("tuner.rundir.directory", "RunDir.end"),
}

BANK_PHASES = [
    *(Phase("tuner.run.bank", "write_bank", 1, when) for when in ("before", "after")),
    *(Phase("tuner.run.bank", "ModelBank.take", 1, when) for when in ("before", "after")),
]


def prepare(directory: Path) -> None:
    """Write the model, the rows of each window and the recipe."""
    trainings.prepare(directory, 1)
    shutil.copy(RECIPE, directory / "r.yaml")
    (directory / "logs").mkdir()
    for name, count in ROWS.items():
        rng = random.Random(name)
        rows = [{"prompt": f"{name}-{i} ", "completion": "ab" * rng.randint(1, 20)} for i in range(count)]
        write_lines(directory / "logs" / f"{name}.jsonl", rows)
    (directory / "held.jsonl").write_text((directory / "logs" / "w2.jsonl").read_text().replace("w2", "held"))


@dataclass
class Work:
    """A directory with a recipe and its sources, and the commands that are run there."""

    directory: Path
    world_size: int
    start: Start = subprocess.Popen
    out: Path | None = None

    def run(self, words: Sequence[str], phase: Phase = Phase(), beside: Callable[[], None] | None = None) -> int:  # noqa: B008 - frozen
        """Run a command to its end, with a thread that does something meanwhile; returns its exit code."""
        env = environment(self.directory / "cache", PYTHONWARNINGS="ignore")
        line = [sys.executable, "-c", PROGRAM, str(self.directory / "trained.jsonl"), *phase.words, *words]
        with (self.directory / "said.log").open("ab") as log:
            process = self.start(line, cwd=self.directory, env=env, stdout=log, stderr=log)
            thread = threading.Thread(target=beside or (lambda: None), daemon=True)
            thread.start()
            code = process.wait()
        thread.join(60)
        return code

    def train(self, name: str, *flags: str, phase: Phase = Phase()) -> int:  # noqa: B008 - frozen
        """`tuner train r.yaml`, on as many processes as this work has."""
        processes = ["--parallel.processes", str(self.world_size)] if self.world_size > 1 else []
        return self.run(["train", "r.yaml", "--name", name, "--resume", "auto", *processes, *flags], phase)

    @property
    def said(self) -> str:
        """What all commands said."""
        return (self.directory / "said.log").read_text(errors="replace")

    def trained(self) -> dict[int, list[Any]]:
        """The documents of each step, as it was taken last."""
        return {line["step"]: line["documents"] for line in read_lines(self.directory / "trained.jsonl")}

    def outcome(self, name: str) -> dict[str, Any]:
        """The hash of the last tensors, and the log without what the clock says."""
        return trainings.outcome(self.directory / "runs" / name)


def once(steps: dict[int, list[Any]], documents: int) -> bool:
    """Whether so many documents were trained, each once."""
    counts = Counter(json.dumps(document) for texts in steps.values() for document in texts)
    return len(counts) == documents and set(counts.values()) == {1}


def put_when_awaited(work: Work, name: str) -> None:
    """Put the late window into its place once all steps before it are saved."""
    checkpoint = work.directory / "runs" / name / "checkpoints" / "step-5"
    ended = time.monotonic() + 120
    while not checkpoint.is_dir() and time.monotonic() < ended:
        time.sleep(0.1)
    time.sleep(1.0)
    held = work.directory / f"{LATE}.held"
    if held.is_file():
        held.rename(work.directory / "logs" / f"{LATE}.jsonl")


def trial(work: Work, phase: str, unbroken: dict[str, Any]) -> dict[str, Any]:
    """One run that is killed in a phase, waits for the late window and refuses the damaged one."""
    logs, name = work.directory / "logs", "run"
    damaged, whole = logs / f"{DAMAGED}.jsonl", (logs / f"{DAMAGED}.jsonl").read_text()
    (logs / f"{LATE}.jsonl").rename(work.directory / f"{LATE}.held")
    damaged.write_text(whole[:-9])
    codes = []
    if phase not in ("none", "end"):
        codes.append(work.train(name, phase=PHASES[phase]))
    again = ["train", "r.yaml", "--name", name, "--resume", "auto"]
    again += ["--parallel.processes", str(work.world_size)] if work.world_size > 1 else []
    codes.append(work.run(again, beside=lambda: put_when_awaited(work, name)))
    refused = f"window {DAMAGED}: " in work.said and f"{DAMAGED}.jsonl:{ROWS[DAMAGED]}:" in work.said
    damaged.write_text(whole)
    if phase == "end":
        codes.append(work.train(name, phase=PHASES[phase]))
    codes.append(work.train(name))
    windows = json.loads((work.directory / "runs" / name / "windows.json").read_text())["windows"]
    killed = phase == "none" or -signal.SIGKILL in codes
    steps = work.trained()
    documents = sum(ROWS.values())
    return {
        "phase": phase, "world_size": work.world_size, "codes": codes, "killed": killed,
        "refused_by_name": refused and 3 in codes,
        "left_out": {entry["name"]: entry["left_out"] for entry in windows if entry["left_out"]},
        "each_document_once": work.world_size > 1 or once(steps, documents),
        "identical": work.outcome(name) == unbroken and codes[-1] == 0,
    }


def is_good(result: dict[str, Any]) -> bool:
    """Whether a trial shows what it is to show."""
    return all(value for value in result.values() if isinstance(value, bool))


def stream(work: Work) -> dict[str, Any]:
    """Two passes over the windows, each with its own held-out rows, killed in phases that are drawn until it ends."""
    (work.directory / "held").mkdir()
    for name in ROWS:
        rows = (work.directory / "logs" / f"{name}.jsonl").read_text() or (work.directory / "held.jsonl").read_text()
        (work.directory / "held" / f"{name}.jsonl").write_text(rows.replace(name, f"held {name}"))
    codes = [STOPPED]
    while codes[-1] == STOPPED:
        codes.append(work.train("whole", *STREAM))
    whole, drawn, runs = work.outcome("whole"), random.Random(1), list[bool]()
    phases = [phase for name, phase in PHASES.items() if name not in ("wait", "prepare")]
    while codes.count(-signal.SIGKILL) < KILLS and all(runs):
        (work.directory / "trained.jsonl").unlink()
        name, first = f"killed{len(runs)}", len(codes)
        while len(codes) == first or (codes[-1] in (STOPPED, -signal.SIGKILL) and len(codes) < first + 90):
            codes.append(work.train(name, *STREAM, phase=replace(drawn.choice(phases), nth=drawn.randint(1, 3))))
        counts = Counter(json.dumps(document) for texts in work.trained().values() for document in texts)
        is_each_twice = set(counts.values()) == {2} and len(counts) == sum(ROWS.values())
        runs.append(codes[-1] == 0 and is_each_twice and work.outcome(name) == whole)
    kills = codes.count(-signal.SIGKILL)
    return {"phase": "stream", "runs": len(runs), "kills": kills, "identical_and_each_document_twice": all(runs)}


def bank(work: Work) -> dict[str, Any]:
    """Runs that are killed while they take what another one saves, against ones that have the same and are not."""
    runs, recipe = [] if work.out is None else read_lines(work.out), work.directory / "r.yaml"
    recipe.write_text("".join(line for line in recipe.open() if not line.startswith("adapter:")))  # in full
    others = [PHASES[name] for name in ("beside", "train", "evaluate", "save", "saved", "open")]
    while sum(run["kills"] for run in runs) < BANK_KILLS and all(run["identical"] for run in runs):
        number, drawn, ended, codes = len(runs), random.Random(len(runs)), threading.Event(), [-signal.SIGKILL]
        flags = [*FROZEN, "--model.init_from", json.dumps([{"path": f"runs/source{number}", **GIVEN}])]

        def train(number: int = number, ended: threading.Event = ended) -> None:
            while work.train(f"source{number}", *SOURCE, "--train.stop_after", "1 step") and not ended.is_set():
                pass

        work.train(f"source{number}", *SOURCE, "--train.stop_after", "1 step")
        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        while codes[-1] == -signal.SIGKILL and len(codes) < 30:
            phase = replace(drawn.choice([*others, *BANK_PHASES, *BANK_PHASES]), nth=drawn.randint(1, 2))
            codes.append(work.train(f"killed{number}", *flags, phase=phase))
        ended.set()
        thread.join(120)
        killed, whole = (work.directory / "runs" / f"{name}{number}" for name in ("killed", "whole"))
        whole.mkdir()
        shutil.copy(killed / "bank.json", whole)
        codes.append(work.train(whole.name, *flags))
        versions = json.loads((killed / "bank.json").read_text())
        is_same = versions == json.loads((whole / "bank.json").read_text())
        is_same = is_same and work.outcome(killed.name) == work.outcome(whole.name) and codes[-2:] == [0, 0]
        kills = codes.count(-signal.SIGKILL) - 1
        runs.append({"kills": kills, "versions": len(versions["sources"]["0"]["versions"]), "identical": is_same})
        if work.out is not None:
            write_lines(work.out, runs)
    totals = {name: sum(run[name] for run in runs) for name in ("kills", "versions")}
    return {"phase": "bank", "runs": len(runs), **totals, "identical": all(run["identical"] for run in runs)}


def campaign(
    place: Path, world_size: int, phases: Sequence[str], start: Start = subprocess.Popen, out: Path | None = None
) -> list[dict[str, Any]]:
    """The trials at one world size, in `place`, which is empty."""

    def work(name: str) -> Work:
        directory = place / name
        directory.mkdir(parents=True)
        prepare(directory)
        return Work(directory, world_size, start, out)

    whole = work("unbroken")
    if code := whole.train("run"):
        raise RuntimeError(f"the unbroken run failed: {code}\n{whole.said[-2000:]}")
    unbroken = whole.outcome("run")
    results = Results()
    for phase in phases:
        own = work(phase)
        more = {"stream": stream, "bank": bank}
        results.add(more[phase](own) if phase in more else trial(own, phase, unbroken))
        if not is_good(results.rows[-1]):
            say(own.said[-3000:])
    return results.rows


def main() -> int:
    """Run the campaign."""
    every = [*PHASES, "stream", "bank"]
    options = asked(
        __doc__, phases=some(["none", *every], every), world_sizes=[1, 2],
        out=(Path, "a file with a line of JSON for each run of bank"),
    )
    results = []
    for world_size in options.world_sizes:
        phases = options.phases if world_size == 1 else ["none"]
        with workplace() as directory:
            results += campaign(directory, world_size, phases, out=options.out)
    good = sum(map(is_good, results))
    print(json.dumps({"trials": len(results), "good": good}))
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
