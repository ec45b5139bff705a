"""The section `data.windows`: training data that is read in parts, one after the other; and its rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from tuner.config.eval_tasks import task_of
from tuner.config.numbers import Duration, Span, Whole
from tuner.config.portions import Late, ListFiles, Portion, PortionsSection
from tuner.config.section import Bool, Effect, Rule, table_rules
from tuner.config.value_types import NEVER, Several, Text, Word, once

if TYPE_CHECKING:
    from tuner.config.recipe import DataSource, Recipe


PLACE = "{window}"
"""What the name of a window replaces in the paths of data.train."""


def names_have_a_place(recipe: Recipe, given: Set[str]) -> str | None:
    """Each source has {window} in its path exactly where windows have names."""
    windows = recipe.data.windows
    lacking = [source.name for source in recipe.data.train if PLACE not in source.path]
    if windows.names and lacking:
        return f"{lacking[0]} has no {PLACE} for a window's name; write the source as logs/{PLACE}.jsonl"
    return None


def _cadence_in(key: str, every: object, without_length: bool) -> str | None:
    durations = (every,) if isinstance(every, Duration) else every if isinstance(every, tuple) else ()
    for duration in durations:
        if duration.unit == "epochs":
            return f"{key}: got {duration}; windows are no epochs: write steps or tokens"
        if duration.unit == "%" and without_length:
            return f"{key}: got {duration} of a run whose windows do not say how long it is; write steps or tokens"
    return None


def cadences_without_an_end(recipe: Recipe, given: Set[str]) -> str | None:
    """Cadences in epochs, or in shares of a run of unknown length, are none; what is not written is left out."""
    if not recipe.data.windows.is_on:
        return None
    without_length = recipe.has_open_end
    cadences = {key: attrgetter(key)(recipe) for key in _CADENCES if key in given}
    found = [_cadence_in(key, every, without_length) for key, every in cadences.items()]
    found += [_cadence_in("hooks", hook.every, without_length) for hook in recipe.hooks]
    return next(filter(None, found), None)


def passes_are_whole(recipe: Recipe, given: Set[str]) -> str | None:
    """Over the stream of windows there are whole passes."""
    duration = recipe.train.duration
    if not recipe.has_open_end or recipe.data.windows.passes == "window" or duration.count == int(duration.count):
        return None
    return f"passes over the stream of windows are whole; write train.duration: {int(duration.count) + 1} epochs"


def one_set_is_compared(recipe: Recipe, given: Set[str]) -> str | None:
    """The best of several sets of held-out rows is none."""
    eval_ = recipe.data.eval
    if not isinstance(eval_, tuple) or not any(PLACE in source.path for source in eval_):
        return None
    if not recipe.data.windows.names:
        return f"only windows with names have held-out rows of their own; write data.windows.names, or no {PLACE}"
    if recipe.eval.patience is not None:
        return "each window is evaluated on other rows, which cannot be compared; write eval.patience: null"
    if recipe.checkpoint.keep_best is not None and task_of(recipe.checkpoint.keep_best, recipe.eval.tasks) is None:
        return "each window is evaluated on other rows, which cannot be compared; write checkpoint.keep_best: null"
    return None


_CADENCES = (
    "eval.every", "checkpoint.every", "checkpoint.marks", "checkpoint.keep_every", "export.every", "train.stop_after",
)  # fmt: skip
_DIVIDED = ("data.windows.files", "data.windows.names")
WINDOW_RULES = (
    *table_rules("window_rules"),
    Rule(("data.windows.names", "data.train"), names_have_a_place),
    Rule((*_DIVIDED, *_CADENCES, "hooks"), cadences_without_an_end),
    Rule(("data.windows.passes", "train.duration", *_DIVIDED), passes_are_whole),
    Rule(("data.eval", "data.windows.names", "eval.patience", "checkpoint.keep_best"), one_set_is_compared),
)


END = "END"
"""The file that says of a directory that no more come."""


NAMES = Several(item=Text(what="names", pattern=r"[^/\x00]*[^/\x00.][^/\x00]*"), empty=True)


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
        again = (number for number, window in enumerate(done) if number and window.files == done[0].files)
        count = len(self.names) or next(again, None)  # by count as many as came before the first one came again
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
