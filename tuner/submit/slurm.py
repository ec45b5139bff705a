"""A launch as a batch script of SLURM: the one that ships, with what varies filled in."""

import re
import shlex
from collections.abc import Iterable

from tuner.config.shipped import shipped_scripts
from tuner.errors import RecipeError
from tuner.submit.job import Job

_HEADER = "#SBATCH --"
_CONTAINER = "container=()"
_OPTION = re.compile(r"([a-z][a-z-]*)(?:=([^\"\\]+))?", re.ASCII)
_PLAIN = re.compile(r"[\w./:@%,+=-]+", re.ASCII)


def script(job: Job, options: Iterable[str] = ()) -> str:
    """The script of a job, for `sbatch`; `options` are further ones of its header, such as `partition=gpu`.

    An image is started by srun's options of pyxis. Raises RecipeError for an option that is none.
    """
    head, body = _parts(shipped_scripts()["train.sbatch"].read_text(encoding="utf-8"))
    asked: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.processes),
        "gpus-per-node": str(job.gpus) if job.gpus else None,
        "cpus-per-task": str(job.cpus),
        "time": _time(job.seconds),
        "mem": None if job.memory is None else f"{job.memory >> 20}M",
    }
    left = {key: value for key, value in asked.items() if value is not None} | dict(map(_option, options))
    lines = []
    for line in head:
        key = line.removeprefix(_HEADER).partition("=")[0] if line.startswith(_HEADER) else None
        if key in left:
            lines.append(_line(key, left.pop(key)))
        elif key not in asked and line != "#" and not line.startswith("#   "):
            lines.append(line)
    lines += [_line(key, value) for key, value in left.items()]
    own = [f"cd {shlex.quote(job.directory)} || exit 4"]
    own += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    own.append(shlex.join(["set", "--", *job.words]))
    rest = "\n".join(body).replace(_CONTAINER, f"container=({_container(job)})", 1)
    return "\n".join([*lines, "", *own, "", rest, ""])


def _parts(text: str) -> tuple[list[str], list[str]]:
    """The lines that SLURM reads, and those from the comment before the first command on."""
    lines = text.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    return lines[: last + 1], lines[last + 2 :]


def _option(text: str) -> tuple[str, str]:
    match = _OPTION.fullmatch(text)
    if match is None or not text.isprintable():
        raise RecipeError(f"--sbatch {text}: no option of sbatch", hint="write --sbatch partition=gpu, without dashes")
    return match[1], match[2] or ""


def _line(key: str, value: str) -> str:
    shown = value if _PLAIN.fullmatch(value) or not value else f'"{value}"'
    return f"{_HEADER}{key}={shown}" if value else f"{_HEADER}{key}"


def _time(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    days, rest = divmod(seconds, 86_400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _container(job: Job) -> str:
    if job.image is None:
        return ""
    mounts = ",".join(f"{volume.source}:{volume.path}" for volume in job.volumes)
    words = [f"--container-image={job.image}", f"--container-workdir={job.directory}"]
    return shlex.join([*words, *([f"--container-mounts={mounts}"] if mounts else [])])
