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
