"""The pool's work on a Ray cluster: a task for each item, answered in the order of the items.

Which items there are, and in which order their answers are taken, is decided here and not there: a task whose worker
is lost is done again elsewhere, and nothing of an answer says by whom or when.
"""

import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from tuner.data.building.pool import QUEUED, QUIET, WINDOW, Answer, Item, PoolJob, WorkerDiedError
from tuner.data.building.worker import hear, heard, portable
from tuner.errors import DataError
from tuner.runtime.memory import calm_collector
from tuner.runtime.ray_cluster import cannot_begin, joined, node_versions, require_same
from tuner.runtime.warned import pass_on

LOST = 20
"""How often a task whose worker is lost is begun again: what loses so many workers loses every one."""
_started: dict[str, Callable[[Any], Any]] = {}
"""In a worker: what answers the items of the job that it has loaded."""
_calm = ExitStack()
"""In a worker: held to its end. Entered for each item, a look for cycles between two would meet all that is loaded."""


def answers(job: PoolJob[Item, Answer], items: Iterable[Item], workers: int) -> Generator[Answer, None, None]:
    """Yield the answer to every item in order, from at most so many workers at a time; 0: all that there are.

    At most `WINDOW` items for each worker are taken ahead, and what a worker raises is raised in its item's turn, as
    with a pool's. Raises WorkerDiedError for an item at which `LOST` workers were lost, MachineError where the cluster
    cannot be joined or has other versions.
    """
    with joined(workers or None) as ray:
        task = ray.remote(_answered).options(name="tuner.prepare", num_cpus=1, max_retries=LOST)
        about = uuid.uuid4().hex, [ray.put(job)], node_versions(), os.getcwd()
        source = iter(items)
        waiting: deque[Any] = deque()
        running: list[Any] = []
        while True:
            there = max(1, int(ray.cluster_resources().get("CPU", 0)))  # a cluster may grow, and shrink
            count = min(workers or there, there)
            at_once = workers if workers and workers < there else QUEUED * count
            for item in islice(source, max(0, min(WINDOW * count - len(waiting), at_once - len(running)))):
                waiting.append(task.remote(*about, item))
                running.append(waiting[-1])
            if not waiting:
                return
            running = ray.wait(running)[1] if waiting[0] in running else running
            while waiting and waiting[0] not in running:
                yield _taken(ray, waiting.popleft())


def _taken(ray: Any, ref: Any) -> Any:
    """The answer of a task that is done, or what it raised."""
    try:
        (answer, error), warnings = ray.get(ref)
    except ray.exceptions.RayTaskError as failed:
        said = (str(failed.cause).splitlines() or [type(failed.cause).__name__])[0]
        raise cannot_begin(said) from failed
    except ray.exceptions.RayError as lost:
        raise WorkerDiedError(f"of the Ray cluster was lost {LOST + 1} times") from lost
    for text in warnings:
        pass_on(text)
    if error is not None:
        raise error
    return answer


def _answered(key: str, job: list[Any], versions: Mapping[str, str], cwd: str, item: Any) -> Any:
    """In a worker: the answer to an item, or the exception in its place, and what was warned of meanwhile.

    The job is fetched and started by the first item of it that a worker meets.
    """
    try:
        if key not in _started:
            _started.clear()
            _started[key] = _start(job[0], versions, cwd)
        return (_started[key](item), None), heard()
    except Exception as error:  # whatever it is, who asked decides
        if isinstance(error, DataError) and isinstance(error.__cause__, FileNotFoundError):
            error.hint = f"the machine {socket.gethostname()} of the Ray cluster must see it under the same path"
        return (None, portable(error)), heard()


def _start(job: Any, versions: Mapping[str, str], cwd: str) -> Callable[[Any], Any]:
    import ray

    require_same(node_versions(), versions, socket.gethostname())
    os.environ.update(QUIET)
    hear()
    _calm.enter_context(calm_collector())
    if os.path.isdir(cwd):
        os.chdir(cwd)  # relative paths are those of the command
    answer: Callable[[Any], Any] = ray.get(job).start()
    return answer
