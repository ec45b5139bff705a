"""Run the tutorial as it is written: its files and commands, in order, in an empty directory, on a real model.

    python -m tools.tutorial_campaign [--model .demo/smollm2] [--work DIR]

The model's hub name is found in a hub cache made of the directory, so that no command is changed and none needs the
network. Each command must end with the exit code that the page says; then the claims of the page are checked: how far
the held-out loss fell, and that the exported model answers with the JSON object. Exits with 1 where one does not hold.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tools.commands import ROOT, STOPPED, asked, read_lines, workplace

PAGE = ROOT / "docs" / "tutorial.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
HIGHEST_LOSS = 0.05
PROMPT_ANSWER = {"name": "Wanda Zhou", "city": "Oslo", "item": "garden hose", "quantity": 5, "total_usd": 98}
SAID = "2 desk lamps for Ana Berg in Lima, 40 dollars.\n"
"""What is typed into the chat."""


@dataclass(frozen=True)
class File:
    """A block that is saved under the name in its first line."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A line of a console block, and the exit code that the page gives it."""

    line: str
    code: int = 0


def steps(page: str) -> list[File | Command]:
    """What a reader of a page does, in order."""
    found: list[File | Command] = []
    for kind, text in FENCE.findall(page):
        named = re.match(r"# ([\w.-]+)\n", text)
        if kind == "console":
            lines = (line[2:] for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.startswith("$ "))
            found += [Command(line, STOPPED if "--train.stop_after" in line else 0) for line in lines]
        elif kind in ("yaml", "python") and named:
            found.append(File(named[1], text))
    return found


def hub_cache(model: Path, home: Path, name: str = MODEL) -> None:
    """Make a cache of the hub that holds a directory under a model's name."""
    commit = "0" * 40
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        (snapshot / file.name).symlink_to(file.resolve())


def environment(work: Path, model: Path) -> dict[str, str]:
    """That of somebody who has installed `tuner`, fetched the model and has no network now."""
    hub_cache(model, work / "huggingface")
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "HF_HOME": str(work / "huggingface"), "HF_HUB_OFFLINE": "1", "TUNER_CACHE": str(work / "cache"),
    }  # fmt: skip
    return {**os.environ, **own}


def follow(page: str, place: Path, env: dict[str, str]) -> str:
    """Do what the page says; what the last `tuner generate --compare` printed. SystemExit where a command fails."""
    compared = ""
    for step in steps(page):
        if isinstance(step, File):
            (place / step.name).write_text(step.text, encoding="utf-8")
            continue
        print(f"\n$ {step.line}", file=sys.stderr, flush=True)
        started = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", step.line], cwd=place, env=env, input=SAID, stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, end="", file=sys.stderr)
        print(f"# {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
        if done.returncode != step.code:
            raise SystemExit(f"exit code {done.returncode}, the page says {step.code}: {step.line}")
        if "--compare base" in step.line:
            compared = done.stdout
    return compared


def problems(place: Path, compared: str) -> list[str]:
    """Which claims of the page do not hold."""
    losses = [line["loss"] for line in read_lines(place / "runs" / "orders" / "metrics.jsonl", "eval")]
    found = (
        [] if losses[-1] < HIGHEST_LOSS < losses[0] else [f"the held-out loss went from {losses[0]} to {losses[-1]}"]
    )
    objects = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", compared.replace("\n", " "))]
    return found + ([] if PROMPT_ANSWER in objects else [f"the export answered {compared!r}"])


def main() -> int:
    """Follow the tutorial; exit code 1 where it does not hold."""
    options = asked(
        __doc__, model=(ROOT / ".demo" / "smollm2", "directory of the model"),
        work=(Path, "an empty directory that is kept; default: one that goes"),
    )
    started = time.monotonic()
    with workplace(options.work) as work:
        place = work / "place"
        place.mkdir(parents=True)
        compared = follow(PAGE.read_text(encoding="utf-8"), place, environment(work, options.model))
        missed = problems(place, compared)
    print(json.dumps({"minutes": round((time.monotonic() - started) / 60, 1), "problems": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
