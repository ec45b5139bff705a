"""How a run went up to a checkpoint, from its `metrics.jsonl`: what is determined, no times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonlines

from tuner.rundir.layout import METRICS

POINTS = 12
_DETERMINED = ("step", "epoch", "tokens", "loss", "lr", "grad_norm")


def curve(run_dir: Path, last_step: int) -> dict[str, list[dict[str, Any]]]:
    """Lines of training, evenly thinned to a dozen with the last one, and all evaluations, thinned likewise.

    Empty lists where there are none. Lines that are cut short are passed over.
    """
    found: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    path = run_dir / METRICS
    if path.is_file():
        with jsonlines.open(path) as reader:
            for line in reader.iter(type=dict, skip_invalid=True):
                if line.get("kind") in found and isinstance(line.get("step"), int) and line["step"] <= last_step:
                    found[line["kind"]].append({key: line[key] for key in _DETERMINED if line.get(key) is not None})
    return {kind: thinned(lines) for kind, lines in found.items()}


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most a dozen of them, the first and the last among these."""
    if len(lines) <= POINTS:
        return lines
    return [lines[round(i * (len(lines) - 1) / (POINTS - 1))] for i in range(POINTS)]
