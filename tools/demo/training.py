"""Watch a training from outside: its loss, its sample answers, and, once, kill it."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.demo.shell import Missed, Stage, dim, say

POLL_S = 0.25
SHOW_EVERY = 5


@dataclass
class Lines:
    """The complete lines that were added to a JSONL file since the last look; the file may appear late or shrink."""

    path: Path
    offset: int = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield each new line's object."""
        if not self.path.is_file():
            return
        data = self.path.read_bytes()
        self.offset = min(self.offset, len(data))
        end = data.rfind(b"\n") + 1
        fresh, self.offset = data[self.offset : end], max(end, self.offset)
        for line in fresh.splitlines():
            yield json.loads(line)


@dataclass
class Watch:
    """What a person sees of a run while it trains."""

    run: Path
    metrics: Lines = field(init=False)
    samples: Lines = field(init=False)
    step: int = 0

    def __post_init__(self) -> None:
        self.metrics = Lines(self.run / "metrics.jsonl")
        self.samples = Lines(self.run / "samples.jsonl")

    def look(self, show_samples: bool) -> None:
        """Print what is new."""
        for line in self.metrics.new():
            if line.get("kind") == "train":
                self.step = int(line["step"])
                if self.step % SHOW_EVERY == 0:
                    say(f"    step {self.step:3d}   loss {line['loss']:.4f}   {line.get('tok_per_s', 0):,.0f} tokens/s")
            elif "loss" in line:
                say(f"    step {int(line['step']):3d}   held-out loss {line['loss']:.4f}")
        for line in self.samples.new():
            if show_samples:
                show_sample(line)


def show_sample(line: dict[str, Any]) -> None:
    """Print one held-out answer as it is at this step, and the wanted one."""
    answer = " ".join(str(line["answer"]).split())
    mark = "=" if answer == str(line["reference"]).strip() else "x"
    say(f"      {mark} step {line['step']:<3} {answer[:110]}")


def run(stage: Stage, words: Sequence[str], watch: Watch, *, samples: bool, kill_at: int | None = None) -> None:
    """Run a training command and show it live; with `kill_at`, kill it with -9 once that step is done."""
    say(f"{dim('$')} {shlex.join(('tuner', *words))}")
    process = subprocess.Popen(
        ["tuner", *words],
        cwd=stage.work,
        env=stage.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    tail: list[str] = []
    readers = [
        threading.Thread(target=_drain, args=(process.stderr, tail), daemon=True),
        threading.Thread(target=_drain, args=(process.stdout, []), daemon=True),
    ]
    for reader in readers:
        reader.start()
    delay = random.SystemRandom().uniform(0, 1.5)
    try:
        while process.poll() is None:
            watch.look(samples)
            if kill_at is not None and watch.step >= kill_at:
                time.sleep(delay)
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(POLL_S)
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join()
    watch.look(samples)
    expected = -signal.SIGKILL if kill_at is not None else 0
    if process.returncode != expected:
        raise Missed(f"`tuner {words[0]}` exited with {process.returncode}\n" + "\n".join(tail[-20:]))


def _drain(stream: Any, kept: list[str]) -> None:
    """Echo the run's own lines, and keep them for an error's sake."""
    for line in stream:
        kept.append(line.rstrip())
        if line.strip():
            say(f"    {dim('|')} {line.rstrip()}")
