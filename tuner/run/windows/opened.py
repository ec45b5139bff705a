"""A window opened: its rows become the ones that are trained, and the plan continues over them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.data.building.spec import PrepareSpec
from tuner.data.prepared import open_prepared
from tuner.errors import DataError
from tuner.run.windows.preparation import prepared_window
from tuner.rundir.windows import WindowEntry, WindowPosition, write_windows
from tuner.setup.build import Assembly, held_out_rows
from tuner.setup.probes import probes_of
from tuner.setup.timetable import PortionPlans
from tuner.train.prefetcher import Prefetcher
from tuner.train.progress import Progress


@dataclass
class OpenedWindows:
    """The windows of a run as far as a launch is, on every rank."""

    spec: PrepareSpec
    position: WindowPosition
    rows: Prefetcher | None = field(default=None, init=False)
    """What takes the rows of the window at hand; there during the loop."""

    def as_state(self) -> list[dict[str, Any]]:
        """Their part of a checkpoint's JSON state: the window at hand is the last."""
        return [entry.as_state() for entry in self.position.decided]

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint at the end of the current window, though others follow."""
        return self.trained % self.spec.data.windows.save_every == 0

    @property
    def trained(self) -> int:
        """How many windows the run has trained, with the current one."""
        return sum(not entry.left_out for entry in self.position.decided)

    def write(self, run_dir: Path) -> None:
        """Note the windows in the run directory. Raises MachineError."""
        write_windows(run_dir, self.position.entries)

    def open(
        self, entry: WindowEntry, decided: tuple[WindowEntry, ...], assembly: Assembly, progress: Progress
    ) -> None:
        """Go over to a window that is prepared, after those that were `decided`: steps are its own from now on.

        Raises DataError where its rows are not those that the run had there before.
        """
        plans, first = PortionPlans(assembly.resolved), progress.step
        assert self.rows is not None
        prepared = open_prepared(prepared_window(self.spec, entry))
        rows, plan = prepared.train, plans.plan(len(prepared.train), first)
        opened = replace(entry, first_step=first, last_step=plan.total_steps)
        if entry.last_step and opened != entry:
            raise DataError(f"window {entry.name}: opened after step {entry.first_step} before, and after {first} now")
        self.position = WindowPosition((*decided, opened), len(decided))
        assembly.probes[:] = probes_of(assembly.resolved, rows)
        if assembly.held_out is not None:
            assembly.held_out.become(held_out_rows(self.spec.data, prepared), entry.name)
        progress.plan, progress.data_start = plan, first
        progress.more_to_come = may_follow(assembly, progress)
        progress.saves_last, progress.portions = self.is_saved, self.trained
        self.rows.go_over(rows, len(decided), first, plan.total_steps)


def may_follow(assembly: Assembly, progress: Progress) -> bool:
    """Whether a window may follow the one at hand: the run does not end with it by its duration."""
    limit = PortionPlans(assembly.resolved).limit
    return limit is None or progress.plan.total_steps < limit
