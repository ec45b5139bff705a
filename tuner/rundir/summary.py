"""What a run came to, in a few figures, and in which keys of their recipes runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.rundir.record import Run, started

NAMES = frozenset({"name", "output_dir"})
"""Keys that differ between any two runs."""


def summary(run: Run) -> dict[str, Any]:
    """A run's figures as JSON values; None where it has none.

    `loss` is the newest step's, `eval_loss` the newest evaluation's; `seconds` the time of all launches, start and
    evaluations included. `damage` is what is wrong with the last checkpoint by its manifest and sizes.
    """
    step, evaluations, best = run.latest.step or {}, run.latest.evaluations, run.latest.best
    return {
        "name": run.name,
        "path": str(run.path),
        "run_id": run.record.get("run_id"),
        "status": run.status,
        "damage": run.damage,
        "step": run.step,
        "total_steps": run.total_steps,
        "tokens": step.get("tokens"),
        "loss": step.get("loss"),
        "eval_loss": evaluations[-1].get("loss") if evaluations else None,
        "best_eval_loss": best["loss"] if best else None,
        "best_eval_step": best["step"] if best else None,
        "seconds": round(run.seconds, 1),
        "tok_per_s": step.get("tok_per_s"),
        "started": started(run),
        "launches": len(run.launches),
    }


def source_losses(run: Run) -> dict[str, float]:
    """The newest evaluation's loss of each source by name; empty where there is one source alone."""
    newest = run.latest.evaluations[-1] if run.latest.evaluations else {}
    return {key.removeprefix("loss/"): value for key, value in newest.items() if key.startswith("loss/")}


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys, in the recipes' order, whose values are not the same in all of them; names and places are left out."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [
        key
        for key in keys
        if key not in NAMES and any(recipe.get(key) != recipes[0].get(key) for recipe in recipes[1:])
    ]
