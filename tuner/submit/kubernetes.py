"""A launch as Kubernetes' manifests: an Indexed Job with a Service, or a JobSet, and the script that each pod runs.

Values are written as JSON, which is YAML: whatever is in them, nothing of it is read as YAML.
"""

import json
import re
from collections.abc import Iterable
from textwrap import indent
from typing import Any

from tuner.errors import RecipeError
from tuner.submit.job import Job, filled, template

PORT = 29400
_RESOURCE = re.compile(r"([\w./-]+)=(\d+)", re.ASCII)
_EVICTED = """\
    - action: Ignore # evicted, preempted, or its machine is gone: the cluster's doing
      onPodConditions: [{type: DisruptionTarget, status: "True"}]"""


def manifest(
    job: Job, restarts: int = 10, jobset: bool = False, secrets: Iterable[str] = (), resources: Iterable[str] = ()
) -> str:
    """The manifests of a job, for `kubectl apply -f -`.

    Failures of machines and of links are answered by so many `restarts`; a plain Job counts those of each pod, a
    JobSet those of all together. `secrets` are names, `resources` devices as `rdma/ib=8`. Raises RecipeError without
    an image, and for a resource that is none.
    """
    if job.image is None:
        raise RecipeError("Kubernetes runs images, and none is given", hint="write --image REGISTRY/tuner:cuda")
    name = label(job.name)
    host = f"{name}-node-0-0.{name}" if jobset else f"{name}-0.{name}"
    env = {"NODES": str(job.nodes), "PROCESSES": str(job.processes), "MASTER_ADDR": host, "MASTER_PORT": str(PORT)}
    volumes, mounts = _volumes(job, name)
    limits = {"backoffLimit": 0} if jobset else {"backoffLimitPerIndex": restarts, "maxFailedIndexes": 0}
    if job.seconds is not None:
        limits["activeDeadlineSeconds"] = job.seconds
    spec = filled(
        "job_spec.yaml",
        {
            "name": name,
            "nodes": str(job.nodes),
            "limits": "\n".join(f"{key}: {value}" for key, value in limits.items()),
            "evicted": "" if jobset else _EVICTED,
            "image": _json(job.image),
            "directory": _json(job.directory),
            "words": _json([_unexpanded(word) for word in ("tuner", "train", *job.words, "--resume", "auto")]),
            "env": _json([{"name": key, "value": _unexpanded(value)} for key, value in (job.env | env).items()]),
            "secrets": _json([{"secretRef": {"name": secret}} for secret in secrets]),
            "resources": _json(_resources(job, resources)),
            "mounts": _json(mounts),
            "volumes": _json(volumes),
        },
    )
    spec = "".join(line for line in spec.splitlines(keepends=True) if line.strip())
    body = {"name": name, "restarts": str(restarts), "job": indent(spec, " " * (10 if jobset else 2)).rstrip()}
    tasks = indent(template("tasks.sh"), "    ", lambda line: bool(line.strip())).rstrip()
    return filled("config_map.yaml", {"name": name, "tasks": tasks}) + filled(
        "jobset.yaml" if jobset else "job.yaml", body
    )


def label(name: str) -> str:
    """A name as Kubernetes takes one for a service: lower case, digits and dashes, from a letter on, 40 at most.

    What it adds to name pods stays within the 63 characters of a host's name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")


def _resources(job: Job, more: Iterable[str]) -> dict[str, dict[str, str]]:
    asked = {"cpu": str(job.cpus * job.processes)}
    if job.memory is not None:
        asked["memory"] = f"{job.memory >> 20}Mi"
    devices = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    for text in more:
        match = _RESOURCE.fullmatch(text)
        if match is None:
            raise RecipeError(f"--resource {text}: not NAME=COUNT", hint="write --resource rdma/ib=8")
        devices[match[1]] = match[2]
    return {"requests": asked | devices, "limits": {key: asked[key] for key in asked if key == "memory"} | devices}


def _volumes(job: Job, name: str) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The volumes of a pod, and where its container sees them."""
    # NCCL's processes meet in shared memory, of which containers have 64 MB otherwise.
    sources: dict[str, tuple[dict[str, Any], str]] = {
        "script": ({"configMap": {"name": name}}, "/etc/tuner"),
        "shm": ({"emptyDir": {"medium": "Memory"}}, "/dev/shm"),
    }
    for number, volume in enumerate(job.volumes):
        is_host = volume.source.startswith("/")
        claim = {"persistentVolumeClaim": {"claimName": volume.source}}
        sources[f"data-{number}"] = ({"hostPath": {"path": volume.source}} if is_host else claim, volume.path)
    mounts = [{"name": key, "mountPath": path} for key, (_, path) in sources.items()]
    return [{"name": key, **source} for key, (source, _) in sources.items()], mounts


def _unexpanded(text: str) -> str:
    """A text in which Kubernetes puts no variable's value: it reads `$(NAME)`, and `$$` as a dollar."""
    return text.replace("$", "$$")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
