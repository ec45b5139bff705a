"""Preparation in a process of its own, for one that holds much already: what a row takes is not on top of that."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tuner.data.building.pool import WorkerDiedError, WorkerPool
from tuner.data.building.spec import PrepareSpec, Source
from tuner.errors import MachineError
from tuner.runtime.console import Console

FROM_BYTES = 1 << 20
"""Fewer bytes of rows, as they are, take little: a process of its own would take longer to start."""


@dataclass(frozen=True)
class _Preparation:
    """What the process does. A `pool.Job`."""

    prepare: Callable[[PrepareSpec, Console], object]
    """`prepare.prepare`, which imports this module."""
    spec: PrepareSpec
    is_heard: bool

    def start(self) -> Callable[[None], None]:
        """Nothing is needed before."""

        def build(_: None) -> None:
            self.prepare(self.spec, Console(level="info" if self.is_heard else "warning"))

        return build


def is_better_apart(sources: Iterable[Source]) -> bool:
    """Whether rows may be long, or more than the size of their file says."""
    files = [file for source in sources for file in source.files]
    if any(file.name == "-" for file in files):
        return False  # this process alone has standard input
    unknown = any(file.compression or file.kind in ("parquet", "arrow") for file in files)
    return unknown or sum(file.size() for file in files) >= FROM_BYTES


def prepare_apart(prepare: Callable[[PrepareSpec, Console], object], spec: PrepareSpec, is_heard: bool) -> None:
    """Have a process `prepare`: build what the cache lacks, and say what it does where that `is_heard`.

    Raises what `prepare` does, and MachineError where the process is killed.
    """
    job: WorkerPool[None, None] = WorkerPool(_Preparation(prepare, spec, is_heard), 1)
    try:
        with job:
            list(job.answers([None]))
    except WorkerDiedError as death:
        raise MachineError(
            f"the process that prepared the data {death}",
            hint="where the machine ran out of memory, run tuner prepare-data first, with fewer data.workers",
        ) from death
