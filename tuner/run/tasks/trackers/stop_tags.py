"""A tag that somebody sets on a run's page in its tracker stops the run, as the file STOP does."""

import time
from collections.abc import Callable, Collection
from pathlib import Path

from tuner.rundir.layout import STOP


class StopTags:
    """Asks for the tags of the page at most each so many seconds, and has the launch stop for a new one of ``wanted``,
    in any case. One that was there before has stopped an earlier launch: the run can be resumed with it."""

    def __init__(self, tags: Callable[[], Collection[str]], wanted: Collection[str], every_s: float) -> None:
        self._tags, self._wanted, self._every_s = tags, {tag.lower() for tag in wanted}, every_s
        self._known: set[str] | None = None
        self._asked_at = -every_s

    def look(self, run_dir: Path, say: Callable[[str, str], None]) -> None:
        """Ask where it is time, for the first time at once; raises what the tracker's library does."""
        if time.monotonic() - self._asked_at < self._every_s:
            return
        self._asked_at = time.monotonic()
        found = self._wanted & {tag.lower() for tag in self._tags()}
        new = found - (found if self._known is None else self._known)
        self._known = found
        if new:
            say("stopping", f"the run's page has a new tag, {min(new)}")
            (run_dir / STOP).touch()
