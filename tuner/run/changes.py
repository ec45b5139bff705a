"""What a changed key of the recipe means for a run that goes on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuner.rundir.record import flatten

Effect = Literal["safe", "warn", "refuse"]
ON_RESUME: dict[str, Effect] = {
    "version": "refuse",
    "name": "safe",
    "output_dir": "safe",
    "seed": "refuse",
    "model.": "refuse",
    "model.kernels": "warn",
    "tokenizer.": "refuse",
    "adapter.": "refuse",
    "method.": "refuse",
    "data.": "refuse",
    "data.workers": "safe",
    "data.cache_dir": "safe",
    "train.duration": "refuse",
    "train.stop_after": "safe",
    "train.global_batch_size": "refuse",
    "train.micro_batch_size": "warn",
    "train.precision": "refuse",
    "train.device": "refuse",
    "train.gradient_checkpointing": "safe",
    "train.gradient_checkpointing_layers": "safe",
    "train.compile": "warn",
    "train.max_grad_norm": "refuse",
    "train.nonfinite": "refuse",
    "train.skip_spikes": "refuse",
    "train.deterministic": "warn",
    "train.overfit_first_batch": "refuse",
    "train.mock_batch": "safe",
    "optimizer.": "refuse",
    "schedule.": "refuse",
    "eval.": "safe",
    "eval.max_rows": "warn",
    "checkpoint.": "safe",
    "export.": "safe",
    "parallel.": "safe",
    "parallel.processes": "warn",
    "parallel.shard": "warn",
    "profile.": "safe",
    "logging.": "safe",
    "hooks": "safe",
}
"""By key, or by section with a dot behind it, which counts for its keys that are not listed.

safe: neither weights nor data become other ones. warn: the same run to rounding, or losses that cannot be compared with
those before. refuse: another run.
"""
UNTOLD = frozenset({"name", "output_dir", "train.stop_after"})
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
    """Compare the recipe of a run with one to go on with; an `auto` in the new one matches what it became.

    What is `freed`, keys or sections with a dot behind them, may change: that part of the run begins anew.
    """
    before, after = flatten(old), flatten(new)
    found: dict[Effect, list[str]] = {"safe": [], "warn": [], "refuse": []}
    for key in sorted((before.keys() | after.keys()) - UNTOLD):
        if before.get(key) != after.get(key) and after.get(key) != "auto":
            is_freed = any(key == name or (name.endswith(".") and key.startswith(name)) for name in freed)
            found["safe" if is_freed else effect(key)].append(f"{key} {before.get(key)} -> {after.get(key)}")
    return Changes(**{kind: tuple(lines) for kind, lines in found.items()})
