"""What is shown of a profile: a table for the terminal, and one HTML file that needs nothing else, with its figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.profile.blocks import alike
from tuner.profile.measurement import Measurement
from tuner.profile.prediction import Prediction
from tuner.rundir.page import filled
from tuner.runtime.files import gib, write_atomic

REPORT, FIGURES = "report.html", "report.json"
MARK = b"<!doctype html><!-- tuner profile -->"
"""How every page begins: only such a file is written over."""
_TEMPLATE = Path(__file__).with_name("report.html")


def check_output(directory: Path) -> None:
    """Raise RecipeError where the report would overwrite something else."""
    page = directory / REPORT
    if directory.exists() and not directory.is_dir():
        raise RecipeError(f"--output {directory}: not a directory", hint="choose another one")
    if page.is_symlink() or (page.exists() and not page.read_bytes().startswith(MARK)):
        raise RecipeError(f"{page} holds something else than a profile", hint="choose another directory with --output")


def write_report(
    directory: Path, recipe: Recipe, measured: Measurement | None, predicted: Prediction | None = None
) -> dict[str, Path]:
    """Write the page and its figures into a directory, which `check_output` looked at; one of the two is given.

    Returns the files by what they are. Raises MachineError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    figures = report_figures(recipe, measured, predicted)
    paths = {"report": directory / REPORT, "figures": directory / FIGURES}
    write_atomic(paths["report"], filled(_TEMPLATE, figures).encode())
    write_atomic(paths["figures"], json.dumps(figures, indent=1, allow_nan=False).encode())
    files = {} if measured is None else {name: directory / file for name, file in measured.files.items()}
    return paths | files


def report_figures(recipe: Recipe, measured: Measurement | None, predicted: Prediction | None) -> dict[str, Any]:
    """What the page draws, as plain values."""
    about = measured or predicted
    assert about is not None
    model = Path(recipe.model.name_or_path).name
    trained = "full" if recipe.adapter.kind == "none" else recipe.adapter.kind
    words = [model, trained, about.device, f"{about.processes} process" + ("es" if about.processes > 1 else "")]
    limit, total_steps, holders, way_out = 0, 0, [], ""
    if predicted is not None:
        limit, total_steps = predicted.limit_bytes, predicted.time.total_steps or 0
    if measured is not None:
        limit, total_steps = measured.free_bytes, measured.total_steps
        way_out = "" if measured.shortage is None else measured.shortage.flags()
        words.append(f"{measured.precision} compute")
        together = alike(measured.memory.largest)
        holders = [{"owner": owner, "part": part, "bytes": size} for owner, part, size in together]
    return {
        "title": recipe.name or model,
        "subtitle": " · ".join(words),
        "verdict": about.verdict,
        "limit_bytes": limit,
        "total_steps": total_steps,
        "way_out": way_out or None,
        "holders": holders,
        "measured": None if measured is None else measured.as_json(),
        "predicted": None if predicted is None else _prediction(predicted),
    }


def parts_table(measured: Measurement) -> str:
    """The peak by part, by phase, and who holds most of it, for the terminal."""
    memory = measured.memory
    fullest = max(memory.phases, key=lambda phase: memory.phases[phase])
    lines = [f"{gib(memory.peak_bytes):>12}  at the peak, in {fullest}"]
    lines += [f"{gib(size):>12}  {part}" for part, size in memory.parts.items() if size]
    lines.append(" ".join(f"{phase} {gib(size)}" for phase, size in memory.phases.items()))
    lines += [f"{gib(size):>12}  {part:<12} {owner}" for owner, part, size in alike(memory.largest)[:5]]
    return "\n".join(lines)


def _prediction(found: Prediction) -> dict[str, Any]:
    """A prediction as plain values; ``counted`` is the part of it that an allocator counts in a step, and its peak."""
    time, counted = found.time, found.memory.counted_peak()
    return {
        "counted": counted,
        "counted_bytes": sum(counted.values()),
        "peak_bytes": found.peak_bytes,
        "error": found.error,
        "verdict": found.verdict,
        "parts": dict(found.memory.peak.parts),
        "course": [asdict(moment) for moment in found.memory.moments],
        "assumptions": list(found.assumptions),
        "time": asdict(time) | {"tok_per_s": time.tok_per_s, "total_s": time.total_s},
    }
