"""What the tasks of one launch have in common."""

from dataclasses import dataclass

from tuner.run.build import Assembly
from tuner.run.resets import Reset
from tuner.rundir.directory import RunDir
from tuner.runtime.console import Console
from tuner.runtime.stop import StopSignals
from tuner.train.progress import Progress


@dataclass(frozen=True)
class LaunchContext:
    """One launch of a run: what was built, how far it is, where it writes and what it listens to."""

    run: RunDir
    run_id: str
    """The same for every launch of a run."""
    assembly: Assembly
    progress: Progress
    resets: tuple[Reset, ...]
    """What of the run started afresh, and where."""
    console: Console
    signals: StopSignals
