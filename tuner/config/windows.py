"""The section `data.windows`: training data that is read in parts, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tuner.config.duration import Duration, Span
from tuner.config.numbers import Whole
from tuner.config.portions import Late, ListFiles, Portion, PortionsSection
from tuner.config.rule import Rule
from tuner.config.section import Bool, Effect
from tuner.config.value_types import NEVER, Several, Text, Word, once
from tuner.config.window_rules import PLACE, WINDOW_RULES

if TYPE_CHECKING:
    from tuner.config.recipe import DataSource

END = "END"
"""The file that says of a directory that no more come."""


NAMES = Several(item=Text(kind="names", pattern=r"[^/\x00]*[^/\x00.][^/\x00]*"), empty=True)


class WindowsSection(PortionsSection):
    """Training data in windows: each is prepared, trained, evaluated and saved before the next one begins."""

    files: Annotated[int | None, Whole(ge=1, le=2**31)] = None
    """Train in windows of so many files of each source, in the order of their names; null: not by count."""
    names: Annotated[tuple[str, ...], NAMES, once()] = ()
    """Train in windows by name, in this order: each takes the place of {window} in the paths of data.train."""
    passes: Word[Literal["window", "stream"]] = "window"
    """What an epoch goes over: each window before the next one begins, or the stream of all windows."""
    grow: Bool = False
    """With files: more files may come, until one called END lies next to them, or the run has its steps."""
    wait: Annotated[Duration | None, Span(units=("s", "min", "h"), aliases=NEVER)] = Duration.parse("10 min")
    """How long a window that is not there yet is waited for once training needs it; never: not at all."""
    late: Word[Literal["stop", "skip"]] = "stop"
    """What follows then: stop, so that the run can be resumed (exit code 75), or skip it for good (names only)."""
    empty: Word[Literal["skip", "wait", "refuse"]] = "skip"
    """A window without a row: skip it for good, wait for it as for one that is late, or refuse it (exit code 3)."""

    noun: ClassVar[str] = "window"
    rules: ClassVar[tuple[Rule, ...]] = WINDOW_RULES
    save_every: Annotated[int, Whole(ge=1, le=2**31)] = 1
    """Save at the end of every so many windows; where the run or a launch ends, there is a checkpoint anyway."""
    per_launch: Annotated[int | None, Whole(ge=1, le=2**31)] = None
    """End a launch at the end of so many windows, for the next one to resume; null: none ends it."""
    on_resume: ClassVar[Mapping[str, Effect]] = dict.fromkeys(
        ("wait", "late", "empty", "save_every", "per_launch"), "safe"
    )

    @property
    def is_on(self) -> bool:
        """Whether there are windows at all."""
        return self.files is not None or bool(self.names)

    def next_portion(
        self, sources: Sequence[DataSource], done: Sequence[Portion], files: ListFiles, passes: int | None = 1
    ) -> Portion | Late | None:
        """The window after those that are done or left out; None where there are no more.

        It follows from these and from what lies there now, by names: no file's content is read. A later pass has the
        windows of the first one: those by name as they are by then. Raises DataError for sources by count that are not
        there and are not said to grow.
        """
        count = len(self.names) or self._first_pass(done)
        if count is None:
            found = self._counted(sources, {file for window in done for file in window.files}, len(done), files)
            if found is not None or not done:
                return found
            count = len(done)
        if passes is not None and len(done) >= passes * count:
            return None
        number = len(done) % count
        return self._named(tuple(sources), self.names[number], files) if self.names else done[number]

    def passes_in(self, duration: Duration) -> int | None:
        """One, unless an epoch is a pass over all windows; without an end where the steps say how long a run is."""
        if self.passes == "window":
            return 1
        return int(duration.count) if duration.unit == "epochs" else None

    def sources_of(self, sources: tuple[DataSource, ...], name: str) -> tuple[DataSource, ...]:
        """With the name in their paths, where windows have names."""
        if not self.names:
            return sources
        return tuple(source.model_copy(update={"path": source.path.replace(PLACE, name)}) for source in sources)

    def may_come_later(self, source: DataSource) -> bool:
        """Those of windows by name may."""
        return PLACE in source.path

    @staticmethod
    def _first_pass(done: Sequence[Portion]) -> int | None:
        """How many windows by count a pass has; None where none of them has come again yet."""
        return next((number for number, window in enumerate(done) if number and window.files == done[0].files), None)

    def _named(self, sources: tuple[DataSource, ...], name: str, files: ListFiles) -> Portion | Late:
        every: list[str] = []
        for source in self.sources_of(sources, name):
            found = files(source, False)
            if not found:
                return Late(name, f"{source.path}: no such file")
            every += found
        return Portion(name, tuple(every))

    def _counted(
        self, sources: Sequence[DataSource], taken: set[str], number: int, files: ListFiles
    ) -> Portion | Late | None:
        """The next files of each source. Sources that end earlier than others have none in the last windows."""
        assert self.files is not None
        grows = self.grow and not all(_is_ended(source) for source in sources)
        chosen: list[str] = []
        for source in sources:
            found = [file for file in files(source, not self.grow) if file not in taken]
            if grows and len(found) < self.files:
                missing = f"{source.path}: {len(found)} of the next {self.files} file{'s' if self.files > 1 else ''}"
                return Late(f"number {number + 1}", missing)
            chosen += found[: self.files]
        if not chosen:
            return None
        first, last = Path(chosen[0]).name, Path(chosen[-1]).name
        return Portion(first if len(chosen) == 1 else f"{first} to {last}", tuple(chosen))


def _is_ended(source: DataSource) -> bool:
    """Whether the file that ends a source lies in its directory, or next to the files that it names."""
    path = Path(source.path)
    return ((path if path.is_dir() else path.parent) / END).exists()
