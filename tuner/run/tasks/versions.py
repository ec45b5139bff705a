"""The task that looks for newer versions of other models on a cadence: of a teacher, or of the weights of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from tuner.run.parts.part import LaunchContext
from tuner.run.tasks.log import LogTask
from tuner.rundir.versions import TakenVersion
from tuner.runtime.console import Console
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import Assembly
from tuner.train.progress import Progress
from tuner.train.tasks import Event, Request, Task


class TakesVersions(Protocol):
    """Models of which newer versions are taken, by number, on every rank."""

    label: str
    """On the console."""

    def begin(self, console: Console) -> None:
        """Say which versions a launch begins with."""

    def due(self, progress: Progress, assembly: Assembly) -> Sequence[int]:
        """Of which models newer versions are looked for now."""

    def others(self, due: Sequence[int], step: int, say: Callable[[str], None]) -> dict[int, TakenVersion]:
        """Those to have after ``step``, and not there yet: as they were noted, or else the newest ones. On rank 0."""

    def take(self, others: Mapping[int, TakenVersion], assembly: Assembly, step: int) -> None:
        """Go over to these. Collective."""

    def looked_after(self, due: Sequence[int], step: int) -> None:
        """What was found is final."""

    def write(self, run_dir: Path) -> None:
        """Write down what a launch after this one is to take. On rank 0."""


class VersionsTask(Task):
    """Takes newer versions where they are due: before the evaluation and the save of the step, which show them.

    It looks after a launch's last step, too: whoever resumes there continues with what an unbroken run has.
    """

    def __init__(self, context: LaunchContext, versions: TakesVersions, log: LogTask) -> None:
        self._context, self._versions, self._log, self._ranks = context, versions, log, Collective(gloo_group())

    def start(self) -> None:
        """Note the versions that the launch begins with, and say which they are. Collective."""
        self._ranks.on_rank0(partial(self._versions.write, self._context.run.path))
        self._versions.begin(self._context.console)

    def between_steps(self, agreed: Request) -> Iterator[Event]:
        """Look where it is due. Collective. Raises what a version that cannot be taken does."""
        versions, progress, assembly = self._versions, self._context.progress, self._context.assembly
        if not (due := versions.due(progress, assembly)):
            return
        yield from self._log.flush()
        say = partial(self._context.console.say, versions.label)
        with self._log.clock.pause() as pause:
            if others := self._ranks.on_rank0(partial(versions.others, due, progress.step, say)):
                versions.take(others, assembly, progress.step)
            versions.looked_after(due, progress.step)
            self._ranks.on_rank0(partial(versions.write, self._context.run.path))  # before the first step with them
        for version in others.values():
            say(f"{version.name} from here on, loaded in {pause.seconds:.1f} s")
