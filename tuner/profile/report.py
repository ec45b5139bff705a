"""What is shown of a profile: words and tables for people, plain values for programs, and one HTML file of both."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.config.recipe import Recipe
from tuner.errors import RecipeError, counted
from tuner.profile.fit import SHOWN
from tuner.profile.measure import Measurement, duration_text
from tuner.profile.prediction import MIB, NAMES, TENSORS, MemoryMoment, Prediction, largest_first, unit_of
from tuner.profile.recorder import alike
from tuner.profile.search import Choice
from tuner.rundir.curves import filled, require_own
from tuner.runtime.files import gib, write_atomic

REPORT, FIGURES = "report.html", "report.json"
MARK = b"<!doctype html><!-- tuner profile -->"
"""How every page begins: only such a file is written over."""
_TEMPLATE = Path(__file__).with_name("report.html")
PROCESS = {"cpu": "the process itself", "cuda": "CUDA context and communicators"}
"""What is no tensor of a prediction, by the kind of device."""
UNVERIFIED = "unverified: never compared with such a device"


def check_output(directory: Path) -> None:
    """Raise RecipeError where the report would overwrite something else."""
    if directory.exists() and not directory.is_dir():
        raise RecipeError(f"--output {directory}: not a directory", hint="choose another one")
    require_own(directory / REPORT, MARK, "a profile")


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
        "names": dict(NAMES),
        "measured": None if measured is None else measured.as_json(),
        "predicted": None if predicted is None else _prediction(predicted),
    }


def parts_table(measured: Measurement) -> str:
    """The peak by part, by phase, and who holds most of it, for the terminal."""
    memory = measured.memory
    unit = unit_of(memory.peak_bytes)
    fullest = max(memory.phases, key=lambda phase: memory.phases[phase])
    lines = [f"{unit.of(memory.peak_bytes):>12}  tensors at the peak, in {fullest}"]
    lines += [f"{unit.of(size):>12}  {NAMES[part]}" for part, size in memory.parts.items() if size]
    if measured.resident_bytes is not None:
        lines.append(f"{unit.of(measured.resident_bytes):>12}  the whole process (RSS), tensors included")
    lines.append(f"{'':>12}  by phase: {', '.join(f'{p} {unit.of(size)}' for p, size in memory.phases.items())}")
    for owner, part, size in alike(memory.largest)[:5]:
        lines.append(f"{unit.of(size):>12}  {NAMES[part]} of {owner}")
    return "\n".join(lines)


def _prediction(found: Prediction) -> dict[str, Any]:
    """A prediction as plain values; ``counted`` is the part of it that an allocator counts in a step, and its peak."""
    time, counted = found.time, found.memory.counted_peak()
    return {
        "counted": counted, "counted_bytes": sum(counted.values()),
        **_figures(found, "peak_bytes", "tensor_bytes", "process_bytes", "error", "verified", "verdict"),
        "parts": dict(found.memory.peak.parts), "course": [asdict(moment) for moment in found.memory.moments],
        "assumptions": list(found.assumptions),
        "time": asdict(time) | {"tok_per_s": time.tok_per_s, "total_s": time.total_s},
    }


def sentence(prediction: Prediction) -> str:
    """A prediction on one line: the peak by part, whether it fits, and how long the run takes."""
    of = f" in each of {prediction.processes} processes" if prediction.processes > 1 else ""
    tensors = f"tensors {gib(prediction.tensor_bytes)} ({largest_first(prediction.memory.peak.parts, TENSORS)})"
    process = f"{PROCESS[prediction.device_kind]} {gib(prediction.process_bytes)}"
    error = f"stated error {prediction.error:.0%}" + ("" if prediction.verified else f", {UNVERIFIED}")
    fits = f"{prediction.verdict} in {gib(prediction.limit_bytes)} ({error})"
    return f"peak {gib(prediction.peak_bytes)}{of}: {tensors}, {process} · {fits}{_time(prediction)}"


def table(prediction: Prediction) -> list[list[str]]:
    """Bytes by part, a line each, at the peak of all and of each phase; the first line names the columns."""
    phases = list(dict.fromkeys(moment.phase for moment in prediction.memory.moments))
    moments = [moment for phase in phases if (moment := prediction.memory.peak_of(phase)) is not None]
    lines = [["MiB", "peak", *(moment.phase for moment in moments)]]
    shown = [prediction.memory.peak, *moments]
    for part in TENSORS:
        if any(moment.parts[part] for moment in shown):
            lines.append([NAMES[part], *(_cell(moment.parts[part]) for moment in shown)])
    lines.append(["tensors", *(_cell(moment.total - moment.parts["constants"]) for moment in shown)])
    lines.append([NAMES["constants"], *(_cell(moment.parts["constants"]) for moment in shown)])
    return [*lines, ["total", *(_cell(moment.total) for moment in shown)]]


def choices_table(choices: Sequence[Choice]) -> list[list[str]]:
    """The choice and its runners-up, a line each."""
    lines = [["", "peak", "host", "s/step", "overrides"]]
    for number, choice in enumerate(choices[:SHOWN]):
        name = "choice" if number == 0 else "or"
        host = gib(choice.prediction.host_bytes) if choice.prediction.host_bytes else ""
        lines.append([name, gib(choice.prediction.peak_bytes), host, f"{choice.step_s:.3g}", flags(choice)])
    return lines


def flags(choice: Choice) -> str:
    """The overrides as they are typed."""
    return " ".join(f"--{key} {text(value)}" for key, value in choice.overrides.items()) or "(none)"


def text(value: object) -> str:
    """A value as a recipe has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain values, with what follows from it; of the timeline the peak of each phase."""
    tree = asdict(prediction)
    time = prediction.time
    memory = prediction.memory
    peaks = {moment.phase: moment for moment in memory.moments}
    tree["memory"] = {
        "layers": dict(memory.layers), "host": dict(memory.host), "peak": _plain(memory.peak),
        "phases": {phase: _plain(found) for phase in peaks if (found := memory.peak_of(phase)) is not None},
    }
    tree["time"] |= {"tok_per_s": time.tok_per_s, "total_s": time.total_s}
    sizes = ("peak_bytes", "tensor_bytes", "process_bytes", "margin_bytes", "host_bytes")
    return {**tree, **_figures(prediction, "verdict", "verified", *sizes)}


def _figures(prediction: Prediction, *names: str) -> dict[str, Any]:
    return {name: getattr(prediction, name) for name in names}


def _plain(moment: MemoryMoment) -> dict[str, Any]:
    return {**asdict(moment), "total": moment.total}


def _time(prediction: Prediction) -> str:
    time = prediction.time
    step = f" · roughly {duration_text(time.step_s)}/step, {time.tok_per_s:,.0f} tokens/s"
    if prediction.processes > 1:
        step += f", {gib(time.traffic.gathered)} gathered and {gib(time.traffic.reduced)} reduced by each process"
        if time.traffic.exchanged:
            step += f", {gib(time.traffic.exchanged)} of activations exchanged"
    if time.total_s is None or time.total_steps is None:
        return step
    return f"{step}, {counted(time.total_steps, 'step')} in {duration_text(time.total_s)}"


def _cell(size: int) -> str:
    return MIB.number(size) if size else ""
