"""Data that arrive in windows (`data.windows`): the launch trains on the current one, and goes over to later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.data.building.spec import PrepareSpec
from tuner.run.options import RunResult
from tuner.run.parts.part import LaunchContext, LaunchRequest, Part, Preflight, TaskNeeds
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective
from tuner.setup.build import Assembly
from tuner.setup.resolve import Resolved
from tuner.setup.timetable import PortionPlans, Starts, Timetable
from tuner.train.prefetcher import BatchSource, Prefetcher
from tuner.train.progress import Progress
from tuner.train.tasks import Task

if TYPE_CHECKING:
    from tuner.run.windows.finder import OpenedWindows
    from tuner.rundir.windows import WindowPosition


class Windows(Part):
    """Where the run is among its windows: a line is written before the first step on each."""

    name = "windows"
    changes_data = True
    after_saves = True
    _position: WindowPosition
    """From ``prepare_data`` or ``take_over`` on."""
    _opened: OpenedWindows
    """From ``progress_created`` on."""

    def prepare_data(self, request: LaunchRequest) -> Path | RunResult:
        """The rows of the window that the launch begins with; it is waited for."""
        from tuner.run.windows.finder import begin_windows, prepared_window

        begun = begin_windows(request)
        if isinstance(begun, RunResult):
            return begun
        self._position = begun
        return prepared_window(request.spec, begun.current)

    def handed_over(self) -> dict[str, Any]:
        """The position."""
        return self._position.as_plain()

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """The same."""
        from tuner.rundir.windows import WindowPosition

        self._position = WindowPosition.of(plain)

    def starts(self, starts: Starts) -> Starts:
        """A window's rows are counted from its first step."""
        return replace(starts, data=self._position.current.first_step, portion=self._position.number)

    def after_plan(self, resolved: Resolved, rank_info: RankInfo, console: Console) -> None:
        """A reference of columns would have to know the windows that come later. Raises RecipeError."""
        PortionPlans(resolved).check()

    def derivation(self, resolved: Resolved, table: Timetable) -> str:
        """The steps of the current window."""
        return PortionPlans(resolved).words(table.plan, table.data_start)

    def agree(self, spec: PrepareSpec, ranks: Collective) -> Path | None:
        """The window that rank 0 came upon: a late one may have come in between. Collective."""
        from tuner.run.windows.finder import prepared_window

        if (position := ranks.on_rank0(lambda: self._position)) == self._position:
            return None
        self._position = position
        return prepared_window(spec, position.current)

    def progress_created(self, ready: Preflight, assembly: Assembly, progress: Progress) -> None:
        """The windows as the launch begins with them."""
        from tuner.run.windows.finder import OpenedWindows, may_follow

        progress.more_to_come = not self._position.ended and may_follow(assembly, progress)
        self._opened = OpenedWindows(ready.spec, self._position.with_last_step(progress.plan.total_steps))
        progress.saves_last, progress.portions = self._opened.is_saved, self._opened.trained

    def write_facts(self, run_dir: Path) -> None:
        """`windows.json`, which a later launch comes upon."""
        self._opened.write(run_dir)

    def tasks(self, context: LaunchContext, needs: TaskNeeds) -> Sequence[Task]:
        """What goes over to the next window, after the evaluation and the save of this one's last step."""
        from tuner.run.tasks.windows import WindowTask

        return (WindowTask(context, self._opened, needs.log, needs.request, needs.time_left),)

    def source(self, prepared: Prefetcher) -> BatchSource:
        """The rows of the current window, and then those of later ones."""
        self._opened.rows = prepared
        return prepared

    def state(self, step: int) -> Mapping[str, Any]:
        """The windows up to the current one."""
        return {"windows": self._opened.as_state()}
