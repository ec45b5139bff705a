"""What of a run may change when it is resumed, and which parts of it then start afresh."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.load import flatten
from tuner.config.numbers import Duration
from tuner.config.recipe import SECTIONS
from tuner.config.section import Effect
from tuner.data.sources import expand
from tuner.errors import DataError, MachineError, RecipeError
from tuner.setup.timetable import Starts

if TYPE_CHECKING:
    from tuner.checkpoint.open import CheckpointInfo
    from tuner.config.optimizers import Optimizer
    from tuner.config.recipe import DataSection, DataSource

_EFFECTS: dict[Effect, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
ON_RESUME: dict[str, Effect] = {
    **{key: effect for effect, keys in _EFFECTS.items() for key in keys},
    **{f"{name}.{key}": effect for name, section in SECTIONS.items() for key, effect in section.on_resume.items()},
}
"""By key, or by section with a trailing dot, which counts for its keys that are not listed (`changes.json`).

safe: neither weights nor data become other ones. warn: the same run to rounding, or losses that cannot be compared with
those before. refuse: another run.
"""
UNREPORTED = frozenset({"name", "output_dir", "train.stop_after"})
"""Each launch's own: no news."""


@dataclass(frozen=True)
class Changes:
    """Keys whose values differ between two recipes, each as `key old -> new`, by what that means for a resume."""

    safe: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()

    def shown(self) -> str:
        """The first three that are refused, and how many more there are."""
        more = f" and {len(self.refuse) - 3} more" if len(self.refuse) > 3 else ""
        return "; ".join(self.refuse[:3]) + more

    def resets(self) -> str | None:
        """What `--reset` takes for all that is refused to be allowed; None where no reset allows it.

        An optimizer keeps its moments unless its kind, or what they are kept in, changes.
        """
        keys = [line.split(" ", 1)[0] for line in self.refuse]
        parts: set[str] = set()
        for key in keys:
            needed = next((needed for needed, freed in FREED.items() if _is_among(key, freed)), None)
            if needed is None:
                return None
            parts |= needed
        if MOMENTS & set(keys):
            parts.add(STATE)
        words = ["optimizer", *sorted(parts - set(WORDS["optimizer"]))] if STATE in parts else sorted(parts)
        return ",".join(words) or None


def effect(key: str) -> Effect:
    """What a change of a recipe's dotted key means; one below a listed key is part of it. Raises KeyError."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        for listed in (name, f"{name}."):
            if listed in ON_RESUME:
                return ON_RESUME[listed]
    raise KeyError(key)


def changes(old: Mapping[str, Any], new: Mapping[str, Any], freed: Sequence[str] = ()) -> Changes:
    """Compare the recipe of a run with one to resume it with; an `auto` in the new one matches what it became.

    What is `freed`, keys or sections with a trailing dot, may change: that part of the run is reset.
    """
    before, after = flatten(old), flatten(new)
    found: dict[Effect, list[str]] = {"safe": [], "warn": [], "refuse": []}
    for key in sorted((before.keys() | after.keys()) - UNREPORTED):
        if before.get(key) != after.get(key) and after.get(key) != "auto":
            kind = "safe" if _is_among(key, freed) else effect(key)
            found[kind].append(f"{key} {before.get(key)} -> {after.get(key)}")
    return Changes(**{kind: tuple(lines) for kind, lines in found.items()})


def _is_among(key: str, names: Collection[str]) -> bool:
    """Whether a key is one of these, or below a section of them, which ends in a dot."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


STATE, ARGUMENTS = "optimizer.state", "optimizer.arguments"
MOMENTS = frozenset({"optimizer.kind", "optimizer.state", "optimizer.rounding", "optimizer.rows"})
"""Keys on which it depends which moments there are, and of what type."""
WORDS: dict[str, tuple[str, ...]] = {
    "optimizer": (ARGUMENTS, STATE),
    ARGUMENTS: (ARGUMENTS,),
    STATE: (STATE,),
    "schedule": ("schedule",),
    "data": ("data",),
    "rng": ("rng",),
}
"""What `--reset` takes, and the parts that each word means."""
FREED: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({ARGUMENTS}): ("optimizer.",),
    frozenset({"schedule"}): ("schedule.", "train.duration"),
    frozenset({"data"}): ("data.", "train.global_batch_size", "train.batch_"),
    frozenset({"data", "rng"}): ("seed",),
}
"""Keys of the recipe, or sections with a trailing dot, that may change where all of these parts are reset."""


@dataclass(frozen=True)
class Reset:
    """Parts that were reset after a step, and the optimizer's updates until then."""

    step: int
    parts: tuple[str, ...]
    updates: int

    def as_state(self) -> dict[str, Any]:
        """Its part of `run.json` and of a checkpoint's JSON state."""
        return {"step": self.step, "parts": list(self.parts), "updates": self.updates}


def parse_reset(text: str | None) -> tuple[str, ...]:
    """The parts of `--reset optimizer,schedule`. Raises RecipeError for a word that is none."""
    found: set[str] = set()
    for word in () if text is None else map(str.strip, text.split(",")):
        if word not in WORDS:
            near = difflib.get_close_matches(word, WORDS, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise RecipeError(f"--reset {word!r}: not one of {', '.join(WORDS)}{meant}")
        found.update(WORDS[word])
    return tuple(sorted(found))


def optimizer_kind(section: Optimizer) -> str:
    """What an optimizer's moments are: its kind, and what else than usual decides their types, in words."""
    keys = sorted(key.partition(".")[2] for key in MOMENTS - {"optimizer.kind", "optimizer.rows"})
    fields = {key: field.default for key, field in type(section).model_fields.items() if key in keys}
    others = [f"{key} {value}" for key in keys if key in fields and (value := getattr(section, key)) != fields[key]]
    if section.rows:
        others.append(f"rows of {' and '.join(pattern for item in section.rows for pattern in item.match)}")
    return f"{section.kind} with {', '.join(reversed(others))}" if others else section.kind


def allowed_changes(parts: Collection[str], old: str, new: str) -> tuple[str, ...]:
    """What of the recipe may change with these parts, where moments were ``old`` ones and are to be ``new`` ones.

    Raises RecipeError where they would meet another optimizer.
    """
    if ARGUMENTS in parts and STATE not in parts and old != new:
        raise RecipeError(f"--reset {ARGUMENTS}: the state of {old} is none of {new}", hint="write --reset optimizer")
    return tuple(key for needed, keys in FREED.items() if needed <= set(parts) for key in keys)


def resets_of(state: Mapping[str, Any] | None) -> tuple[Reset, ...]:
    """The resets that `run.json`, or a checkpoint's state, holds; checkpoints of earlier versions have none."""
    noted = () if state is None else state.get("resets", ())
    return tuple(Reset(int(item["step"]), tuple(item["parts"]), int(item["updates"])) for item in noted)


def resets_for(
    record: Mapping[str, Any] | None, found: CheckpointInfo | None, parts: Sequence[str]
) -> tuple[Reset, ...]:
    """The resets of a launch that resumes from `found`: those of its run, and one of `parts` there.

    Raises RecipeError where there is nothing to resume from, DataError where the checkpoints since a reset are lost.
    """
    if found is None:
        if parts:
            raise RecipeError("--reset: there is no checkpoint to resume from", hint="leave it out")
        if lost := resets_of(record):
            raise DataError(
                f"the run was reset at step {lost[-1].step} ({', '.join(lost[-1].parts)}), and no checkpoint is left",
                hint="start another run: tuner train RECIPE --name NEW-NAME",
            )
        return ()
    known = resets_of(found.state if record is None else record)
    later = [reset for reset in known if reset.step > found.step]
    if parts:
        here = {part for reset in known if reset.step == found.step for part in reset.parts}
        before = (reset for reset in known if reset.step < found.step)
        return (*before, Reset(found.step, tuple(sorted({*here, *parts})), updates_of(found.state)))
    if later:
        raise DataError(
            f"{found.path}: the run was reset at step {later[0].step} ({', '.join(later[0].parts)}), and no valid "
            "checkpoint from there on is left",
            hint="reset it here: --reset " + ",".join(later[0].parts),
        )
    return known


def pending(resets: Sequence[Reset], step: int) -> tuple[str, ...]:
    """The parts that are reset after `step`, where the run resumes from its checkpoint."""
    return resets[-1].parts if resets and resets[-1].step == step else ()


def starts_of(resets: Sequence[Reset]) -> Starts:
    """Where each part of a run with these resets, in the order of their steps, began last."""

    def last(part: str) -> Reset:
        return next((reset for reset in reversed(resets) if part in reset.parts), Reset(0, (), 0))

    return Starts(last("schedule").step, last("data").step, last("rng").step, last(STATE).updates)


def updates_of(state: Mapping[str, Any]) -> int:
    """How many updates a run had made at a checkpoint: its steps, less those that were left out."""
    return int(state["step"]) - int(state["guard"]["skipped"])


def sources_of_eval(data: DataSection) -> Sequence[DataSource]:
    """The sources of `data.eval`; none where it is a share of the training data."""
    return () if data.eval is None or isinstance(data.eval, Duration) else data.eval


def modified_since(data: DataSection, since: str) -> list[str]:
    """The local files of the recipe's data that were modified after `since`, a time as `run.json` notes it, UTC."""
    time = datetime.fromisoformat(since).timestamp() + 1  # the record counts whole seconds
    local = [source for source in (*data.train, *sources_of_eval(data)) if source.path and Path(source.path).exists()]
    with suppress(DataError, MachineError, OSError):
        return [file.name for file in expand(local) if file.path.stat().st_mtime > time]
    return []
