"""Run a training as a person would, and once kill it from outside."""

import json
import os
import random
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.demo.shell import Missed, Stage, dim, say

POLL_S = 0.25


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


def last_step(lines: Lines, before: int) -> int:
    """The newest trained step among the new lines, or `before`."""
    return max([before, *(int(line["step"]) for line in lines.new() if line["kind"] == "train")])


def run(stage: Stage, words: Sequence[str], killed: tuple[Path, int] | None = None, expected: int = 0) -> int:
    """Run a training command with its messages live; returns the last step seen in the metrics of a killed run.

    `killed` names the run directory to watch and the step after which the process gets a SIGKILL; one that is not
    killed must exit with `expected`.
    """
    say(f"{dim('$')} {shlex.join(('tuner', *words))}")
    process = subprocess.Popen(["tuner", *words], cwd=stage.work, env=stage.env, start_new_session=True)
    step = 0
    try:
        if killed is not None:
            directory, kill_at = killed
            lines = Lines(directory / "metrics.jsonl")
            delay = random.SystemRandom().uniform(0, 1.5)
            while process.poll() is None and step < kill_at:
                time.sleep(POLL_S)
                step = last_step(lines, step)
            time.sleep(delay)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != (expected if killed is None else -signal.SIGKILL):
        raise Missed(f"`tuner {words[0]}` exited with {process.returncode}")
    return step
