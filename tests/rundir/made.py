"""Run directories made by hand."""

import json
from pathlib import Path
from typing import Any


def launch(start: str, end: str | None, first: int, last: int, **more: Any) -> dict[str, Any]:
    entry = {"started": f"2026-01-02T{start}Z", "from_step": first, "versions": {"python": "3.11.7"}, **more}
    if end is not None:
        entry |= {"ended": f"2026-01-02T{end}Z", "status": "finished", "step": last, "saved_step": None, "why": None}
    return entry


def step_line(step: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "tokens": step * 100, "loss": 2.0 / step if loss is None else loss}
    return line | {"lr": 1e-3, "grad_norm": 1.0, "step_s": 0.5, "tok_per_s": 200.0} | more


def eval_line(step: int, loss: float, **sources: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "loss": loss} | {f"loss/{k}": v for k, v in sources.items()} | {"eval_s": 2.0}


def run(
    directory: Path,
    lines: list[dict[str, Any]] | None = None,
    recipe: str = "seed: 1\noptimizer: {lr: 0.001}\n",
    launches: list[dict[str, Any]] | None = None,
    status: str = "finished",
) -> Path:
    """A run directory of four steps, or of the given lines."""
    directory.mkdir(parents=True)
    if lines is None:
        lines = [eval_line(0, 3.0), *map(step_line, range(1, 5)), eval_line(4, 0.75)]
    launches = [launch("10:00:00", "10:01:30", 0, 4)] if launches is None else launches
    record = {"schema": "tuner.run/1", "status": status, "run_id": directory.name, "launches": launches}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "recipe.resolved.yaml").write_text(f"name: {directory.name}\n{recipe}")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
