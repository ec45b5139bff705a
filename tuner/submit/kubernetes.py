"""A launch as Kubernetes' manifests: an Indexed Job with a Service, or a JobSet, and the script that each pod runs.

`templates/manifest.yaml.jinja` is what they are made from. Values are written as JSON, which is YAML: whatever is in
them, nothing of it is read as YAML.
"""

import json
import re
from collections.abc import Iterable
from functools import partial

from jinja2 import Environment

from tuner.errors import RecipeError
from tuner.submit.job import Job, template

_RESOURCE = re.compile(r"([\w./-]+)=(\d+)", re.ASCII)


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
    memory = {} if job.memory is None else {"memory": f"{job.memory >> 20}Mi"}
    devices = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    for text in resources:
        match = _RESOURCE.fullmatch(text)
        if match is None:
            raise RecipeError(f"--resource {text}: not NAME=COUNT", hint="write --resource rdma/ib=8")
        devices[match[1]] = match[2]
    made = Environment(line_statement_prefix="%", keep_trailing_newline=True, autoescape=False)
    made.filters["json"] = partial(json.dumps, ensure_ascii=False)
    made.filters["unexpanded"] = lambda text: text.replace("$", "$$")  # Kubernetes reads $(NAME), and $$ as a dollar
    return made.from_string(template("manifest.yaml.jinja")).render(
        job=job, restarts=restarts, jobset=jobset, secrets=secrets, name=label(job.name), tasks=template("tasks.sh"),
        words=["tuner", "train", *job.words, "--resume", "auto"], limits=memory | devices,
        asked={"cpu": str(job.cpus * job.processes), **memory, **devices},
    )  # fmt: skip


def label(name: str) -> str:
    """A name as Kubernetes takes one for a service: lower case, digits and dashes, from a letter on, 40 at most.

    What it adds to name pods stays within the 63 characters of a host's name.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].strip("-")
