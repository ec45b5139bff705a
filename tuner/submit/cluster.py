"""A launch on a cluster: what is started, on how many machines and with what; as the text that SLURM, Kubernetes or Ray
takes; and the program that takes it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment

from tuner.config.numbers import parse_bytes
from tuner.config.shipped import shipped_scripts
from tuner.errors import MachineError, RecipeError

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
    with suppress(ValueError):
        if text.strip()[-1:].isalpha():
            return parse_bytes(text)
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


OPTIONS = {
    "slurm": "cpus memory time image volume env sbatch",
    "kubernetes": "cpus memory time image volume env secret resource restarts jobset",
    "ray": "",
}
"""Where a recipe can be started, and the options that each takes besides the numbers of machines and GPUs."""
_READS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f", "-")}
"""The programs that read the text of a launch on stdin."""


def require_taken(on: str, given: Mapping[str, Any]) -> None:
    """Raise RecipeError for a cluster that is none, and for an option that only others take."""
    if on not in OPTIONS:
        raise RecipeError(f"--on {on}: not one of {', '.join(OPTIONS)}", hint="write --on slurm")
    for name in given:
        if name not in OPTIONS[on].split():
            takes = " and ".join(each for each, names in OPTIONS.items() if name in names.split())
            raise RecipeError(f"--{name} is for {takes}, not for {on}", hint=f"leave --{name} out")


def text_of(on: str, job: Job, given: Mapping[str, Any]) -> str:
    """The script, the manifests or the command that start a job; `given` are the options that one cluster has."""
    if on == "slurm":
        return script(job, given.get("sbatch", ()))
    if on == "kubernetes":
        own = {name: given[name] for name in ("restarts", "jobset", "secret", "resource") if name in given}
        return manifest(job, **own)
    # Ray's own launch starts a process for each GPU: of the entry point itself it is asked for a core alone.
    ray = ["ray", "job", "submit", "--no-wait", "--entrypoint-num-cpus", "1", "--", "env", "-C", job.directory]
    processes = ["--parallel.processes", str(job.nodes * job.processes)]
    return shlex.join([*ray, "tuner", "train", "--on", "ray", *job.words, *processes, "--resume", "auto"])


def send(on: str, text: str) -> str:
    """Hand the text of a launch to its program; returns what that said, such as the number of the job.

    Raises MachineError where the program is not there, or refuses.
    """
    words = _READS.get(on) or tuple(shlex.split(text))
    if shutil.which(words[0]) is None:
        raise MachineError(
            f"{words[0]} is not on PATH, which hands a launch to {on}",
            hint="run this where it is, or print what it is given with --dry-run",
        )
    given = text if on in _READS else None
    done = subprocess.run(words, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise MachineError(f"{shlex.join(words[:3])} ended with {done.returncode}: {said}")
    return done.stdout.strip()


_HEADER = "#SBATCH --"
_CONTAINER = "container=()"
_OPTION = re.compile(r"([a-z][a-z-]*)(?:=([^\"\\]+))?", re.ASCII)
_PLAIN = re.compile(r"[\w./:@%,+=-]+", re.ASCII)


def script(job: Job, options: Iterable[str] = ()) -> str:
    """The script of a job, for `sbatch`: the one that ships, with what varies filled in.

    `options` are further ones of its header, such as `partition=gpu`.

    An image is started by srun's options of pyxis. Raises RecipeError for an option that is none.
    """
    head, body = _parts(shipped_scripts()["train.sbatch"].read_text(encoding="utf-8"))
    asked: dict[str, str | None] = {
        "job-name": job.name, "nodes": str(job.nodes), "ntasks-per-node": str(job.processes),
        "gpus-per-node": str(job.gpus) if job.gpus else None, "cpus-per-task": str(job.cpus),
        "time": _time(job.seconds), "mem": None if job.memory is None else f"{job.memory >> 20}M",
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


_RESOURCE = re.compile(r"([\w./-]+)=(\d+)", re.ASCII)


def manifest(
    job: Job, restarts: int = 10, jobset: bool = False, secret: Iterable[str] = (), resource: Iterable[str] = ()
) -> str:
    """The manifests of a job, for `kubectl apply -f -`: an Indexed Job with a Service, or a JobSet, and the script that
    each pod runs, from `templates/manifest.yaml.jinja`. Values are written as JSON, which is YAML: whatever is in them,
    nothing of it is read as YAML.

    Failures of machines and of links are answered by so many `restarts`; a plain Job counts those of each pod, a
    JobSet those of all together. `secret` are names, `resource` devices as `rdma/ib=8`. Raises RecipeError without
    an image, and for a resource that is none.
    """
    if job.image is None:
        raise RecipeError("Kubernetes runs images, and none is given", hint="write --image REGISTRY/tuner:cuda")
    memory = {} if job.memory is None else {"memory": f"{job.memory >> 20}Mi"}
    devices = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    for text in resource:
        match = _RESOURCE.fullmatch(text)
        if match is None:
            raise RecipeError(f"--resource {text}: not NAME=COUNT", hint="write --resource rdma/ib=8")
        devices[match[1]] = match[2]
    made = Environment(line_statement_prefix="%", keep_trailing_newline=True, autoescape=False)
    made.filters["json"] = partial(json.dumps, ensure_ascii=False)
    made.filters["unexpanded"] = lambda text: text.replace("$", "$$")  # Kubernetes reads $(NAME), and $$ as a dollar
    return made.from_string(template("manifest.yaml.jinja")).render(
        job=job, restarts=restarts, jobset=jobset, secrets=secret, name=label(job.name), tasks=template("tasks.sh"),
        words=["tuner", "train", *job.words, "--resume", "auto"], limits=memory | devices,
        asked={"cpu": str(job.cpus * job.processes), **memory, **devices},
    )  # fmt: skip


def label(name: str) -> str:
    """A name as Kubernetes takes one for a service: lower case, digits and dashes, from a letter on, 40 at most.

    What it adds to name pods stays within the 63 characters of a host's name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
