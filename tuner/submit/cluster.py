"""What a cluster is given: the text of a launch, and the program that takes it."""

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from tuner.errors import MachineError, RecipeError
from tuner.submit import kubernetes, slurm
from tuner.submit.job import Job

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
        return slurm.script(job, given.get("sbatch", ()))
    if on == "kubernetes":
        return kubernetes.manifest(
            job, given.get("restarts", 10), given.get("jobset", False), given.get("secret", ()),
            given.get("resource", ()),
        )  # fmt: skip
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
