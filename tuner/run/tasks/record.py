"""The task that records steps as `profile.steps` says, and looks at what held the memory where it runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.recipe import ProfileSection
from tuner.errors import MemoryLimitError, is_out_of_memory
from tuner.rundir.layout import PROFILE
from tuner.runtime.console import Console
from tuner.setup.build import Assembly
from tuner.train.tasks import Task

if TYPE_CHECKING:
    from tuner.profile.watch import StepWatch


class RecordTask(Task):
    """Its instruments are imported when they are needed: a training that records nothing does not depend on them."""

    def __init__(self, assembly: Assembly, section: ProfileSection, run_dir: Path, console: Console) -> None:
        self._assembly, self._directory, self._console = assembly, run_dir / PROFILE, console
        self._section = section
        last = assembly.timetable.plan.total_steps
        if beyond := [str(step) for step in section.steps if step > last]:
            console.warn(f"profile.steps: {', '.join(beyond)} comes after the last step, {last}")

    @contextmanager
    def around_step(self, number: int) -> Iterator[None]:
        """Record step ``number`` where the recipe says so. Raises MemoryLimitError where memory does not suffice."""
        watch = self._watch() if number in self._section.steps else None
        recorder = None if watch is None else watch.start(number)
        try:
            yield
        except BaseException as error:
            if watch is not None and recorder is not None:
                watch.stop(recorder)
            cause = error.__cause__ if isinstance(error, MemoryLimitError) else error
            if cause is None or not is_out_of_memory(cause):
                raise
            watch = watch or self._watch()
            if watch is None:
                raise
            raise watch.explain(number, error, cause) from None
        if watch is not None and recorder is not None and watch.stop(recorder):
            watch.write(number, recorder)

    def _watch(self) -> StepWatch | None:
        """The instruments; None, with a warning, where this torch lacks what they are made of."""
        try:
            from tuner.profile.watch import StepWatch
        except (ImportError, AttributeError) as error:
            self._console.warn(f"steps cannot be looked into with this version of torch: {error}")
            return None
        return StepWatch(self._assembly, self._section, self._directory, self._console)
