"""The rules of `data.windows`: what cannot be, with the line to write instead."""

from __future__ import annotations

from collections.abc import Set
from operator import attrgetter
from typing import TYPE_CHECKING

from tuner.config.duration import Duration
from tuner.config.eval_tasks import task_of
from tuner.config.rule import Rule, table_rules

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe

PLACE = "{window}"
"""What the name of a window replaces in the paths of data.train."""
OPEN_SCHEDULES = ("constant", "inverse_sqrt")
"""Kinds of schedule that need no length of the run."""


def names_have_a_place(recipe: Recipe, given: Set[str]) -> str | None:
    """Each source has {window} in its path exactly where windows have names."""
    windows = recipe.data.windows
    lacking = [source.name for source in recipe.data.train if PLACE not in source.path]
    if windows.names and lacking:
        return f"{lacking[0]} has no {PLACE} for a window's name; write the source as logs/{PLACE}.jsonl"
    return None


def keys_need_windows(recipe: Recipe, given: Set[str]) -> str | None:
    """The other keys mean nothing without windows."""
    if recipe.data.windows == type(recipe.data.windows)() or recipe.data.windows.is_on:
        return None
    return "there are no windows; write data.windows.files: 1, or names: [...]"


def windows_are_files(recipe: Recipe, given: Set[str]) -> str | None:
    """Standard input cannot be read in parts."""
    if recipe.data.windows.is_on and any(source.path == "-" for source in recipe.data.train):
        return "standard input has no windows; name files, or remove data.windows"
    return None


def held_out_stays(recipe: Recipe, given: Set[str]) -> str | None:
    """Held-out rows are the same in every window."""
    if recipe.data.windows.is_on and isinstance(recipe.data.eval, Duration):
        return "held-out rows are to be the same for every window; name sources of their own, such as data/eval.jsonl"
    return None


def schedule_without_an_end(recipe: Recipe, given: Set[str]) -> str | None:
    """A schedule that falls towards the end needs to know where that is."""
    if not recipe.has_open_end or recipe.schedule.kind in OPEN_SCHEDULES:
        return None
    return (
        f"{recipe.schedule.kind} needs the length of the run, which windows do not say: write train.duration: 1000 "
        "steps, or schedule: {kind: constant, warmup: 100 steps}"
    )


def warmup_without_an_end(recipe: Recipe, given: Set[str]) -> str | None:
    """A share of a run of unknown length is no number of steps."""
    warmup = getattr(recipe.schedule, "warmup", None)
    if not recipe.has_open_end or recipe.schedule.kind not in OPEN_SCHEDULES or warmup is None or warmup.unit != "%":
        return None
    return (
        f"{warmup} of a run whose windows do not say how long it is; write schedule.warmup: 100 steps, or "
        "train.duration: 1000 steps"
    )


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


def newer_weights_at_bounds(recipe: Recipe, given: Set[str]) -> str | None:
    """Newer weights come at the ends of windows where there are any, and rows in windows have no epochs."""
    units = {duration.unit for entry in recipe.model.init_from for duration in entry.every or ()}
    if "windows" in units and not recipe.data.windows.is_on:
        return "there are no windows to count; write every: 100 steps"
    if "epochs" in units and recipe.data.windows.is_on:
        return "rows that come in windows have no epochs; write every: 1 window"
    return None


_CADENCES = (
    "eval.every", "checkpoint.every", "checkpoint.marks", "checkpoint.keep_every", "export.every", "train.stop_after",
)  # fmt: skip
_KEYS = ("passes", "wait", "late", "empty", "save_every", "per_launch")
_DIVIDED = ("data.windows.files", "data.windows.names")
WINDOW_RULES = (
    *table_rules("window_rules"),
    Rule(("data.windows.names", "data.train"), names_have_a_place),
    Rule((*(f"data.windows.{key}" for key in _KEYS), *_DIVIDED), keys_need_windows),
    Rule((*_DIVIDED, "data.train"), windows_are_files),
    Rule(("data.eval", *_DIVIDED), held_out_stays),
    Rule(("schedule.kind", *_DIVIDED, "train.duration"), schedule_without_an_end),
    Rule(("schedule.warmup", "schedule.kind", *_DIVIDED, "train.duration"), warmup_without_an_end),
    Rule((*_DIVIDED, *_CADENCES, "hooks"), cadences_without_an_end),
    Rule(("data.windows.passes", "train.duration", *_DIVIDED), passes_are_whole),
    Rule(("data.eval", "data.windows.names", "eval.patience", "checkpoint.keep_best"), one_set_is_compared),
    Rule(("model.init_from", *_DIVIDED), newer_weights_at_bounds),
)
