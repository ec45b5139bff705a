"""Run the commands of the demo as a person would, say what is run, and time every part."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PLAIN_PYTHON = ROOT / ".venv-plain" / "bin" / "python"


class Missed(Exception):
    """A command failed, or a promise of the demo did not hold."""


@dataclass
class Stage:
    """Where the demo works, its environment, and how long each part took in seconds."""

    work: Path
    model: Path
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """The environment of every command: offline, with a cache of the demo's own and the repository's `tuner`."""
        keep = {key: value for key, value in os.environ.items() if not key.startswith("TUNER_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{keep.get('PATH', '')}"
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        return {**keep, **quiet, "HF_HUB_OFFLINE": "1", "PATH": path, "TUNER_CACHE": str(self.work / "cache")}

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Head a part of the demo and time it."""
        say(f"\n{bold(f'[{len(self.seconds) + 1}]')} {bold(title)}")
        started = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - started
        say(dim(f"    ({self.seconds[title]:.1f} s)"))

    def tuner(self, *words: str) -> None:
        """Run one `tuner` command in the work directory, its messages and its result straight to the terminal."""
        say(f"{dim('$')} {shlex.join(('tuner', *words))}")
        done = subprocess.run(["tuner", *words], cwd=self.work, env=self.env, check=False)
        if done.returncode:
            raise Missed(f"`tuner {words[0]}` exited with {done.returncode}")

    def command(self, command: Sequence[str]) -> str:
        """Run any command in the work directory; raise `Missed` when it fails."""
        done = subprocess.run(command, cwd=self.work, env=self.env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise Missed(f"`{shlex.join(command[:3])} …` exited with {done.returncode}")
        return done.stdout.strip()

    def module(self, name: str, *words: str) -> str:
        """Run a module of this package with the repository's Python."""
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *words]
        return self.command(command)


def say(text: str = "") -> None:
    """Print one line at once."""
    print(text, flush=True)


def _styled(text: str, code: str) -> str:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{code}m{text}\033[0m" if colour else text


def bold(text: str) -> str:
    """`text` in bold on a terminal."""
    return _styled(text, "1")


def dim(text: str) -> str:
    """`text` faint on a terminal."""
    return _styled(text, "2")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        cells = [line[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
        ]
        text = "   ".join(cells)
        say(f"    {bold(text) if line is head else text}")
