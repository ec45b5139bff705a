"""A launch on a cluster: what is started, on how many machines, and with what."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tuner.config.numbers import parse_bytes
from tuner.errors import RecipeError

_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3}):(\d\d):(\d\d)", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Volume:
    """A directory of the cluster in the containers: of a host, or of the claim that is named, seen at `path`."""

    source: str
    path: str

    @staticmethod
    def of(text: str) -> Volume:
        """Read `SOURCE:PATH`. Raises RecipeError for anything else."""
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/") or not re.fullmatch(r"/[^:,]*|[a-z0-9][a-z0-9.-]*", source, re.ASCII):
            hint = "write --volume runs:/data, or --volume /data:/data"
            raise RecipeError(f"--volume {text}: not SOURCE:/PATH", hint=hint)
        return Volume(source, path)

    def holds(self, path: str) -> bool:
        """Whether a path lies on it."""
        return Path(path).is_relative_to(self.path)


@dataclass(frozen=True)
class Job:
    """What a cluster is asked to start: `tuner train` with `words`, in `directory`, on each of `nodes` machines.

    `seconds` bounds the whole of it, `memory` is in bytes and for a machine, `cpus` are those of a process.
    """

    name: str
    words: tuple[str, ...]
    directory: str
    nodes: int = 1
    gpus: int = 8
    cpus: int = 8
    memory: int | None = None
    seconds: int | None = None
    image: str | None = None
    volumes: tuple[Volume, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """On each machine: one for each of its GPUs, and one where it has none."""
        return max(1, self.gpus)


def bytes_of(text: str) -> int:
    """A size of memory in bytes. Raises RecipeError for another text, and for a number without a unit."""
    try:
        if text.strip()[-1:].isalpha():
            return parse_bytes(text)
    except ValueError:
        pass
    raise RecipeError(f"--memory {text}: no size", hint="write --memory 500GiB")


def seconds_of(text: str) -> int:
    """A time as SLURM writes it, `HH:MM:SS` or `D-HH:MM:SS`, in seconds. Raises RecipeError for another."""
    match = _TIME.fullmatch(text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    if minutes > 59 or seconds > 59 or not (total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds):
        raise RecipeError(f"--time {text}: no time", hint="write --time 04:00:00, or --time 2-00:00:00 for two days")
    return total


def variables(texts: Iterable[str]) -> dict[str, str]:
    """Variables of the environment from `NAME=VALUE`. Raises RecipeError for what is none."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise RecipeError(f"--env {text}: not NAME=VALUE", hint="write --env NCCL_DEBUG=WARN")
        found[name] = value
    return found


def template(name: str) -> str:
    """A text that ships with the package."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
