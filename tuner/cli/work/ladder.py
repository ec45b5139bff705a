"""What `tuner ladder` does and shows: rungs planned, trained, and compared at their marks."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.cli.command import Outcome, input_path
from tuner.cli.output import columns, fitted, stdout_columns
from tuner.cli.work.schedule import drawing, planned_schedule
from tuner.config.load import LoadedRecipe
from tuner.errors import counted
from tuner.ladder import launch
from tuner.ladder.plan_page import PLAN, check_output, plan_lines, write_plan
from tuner.ladder.rungs import Rung, chosen_of, rungs_of
from tuner.runtime.console import Console, Level, clock
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import gib, typed_path

MOST_COLUMNS = 100
BENCHMARK = ("rung", "steps", "step", "tokens/s", "MFU", "memory", "whole run")


def plan(
    loaded: LoadedRecipe, rung: str | None, device: str | None, quick: bool, output: str | None, console: Console
) -> Outcome:
    """Plan every rung, or one, and predict what it takes unless that is to be `quick`; draw it where that is asked."""
    path = None if output is None else input_path(output)
    if path is not None:
        check_output(path)
    with console.doing("building models without storage"):
        every = rungs_of(loaded)
    chosen = chosen_of(every, rung)
    planned = []
    for one in chosen:
        with console.doing(f"predicting {one.name}"):
            planned.append(launch.PlannedRung(one) if quick else launch.predicted(one, device))
    width = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    last = chosen[-1]
    found, _ = planned_schedule(last.loaded.recipe)
    curve = drawing(last.loaded.recipe, found, width)
    table = fitted([PLAN, *plan_lines(planned)], stdout_columns(), right=range(1, len(PLAN)))
    if path is not None:
        write_plan(path, str(loaded.recipe.name), planned)
        console.say("drawn", str(path))
    return Outcome(
        f"{table}\n\n{last.name}\n{curve}",
        artifacts={"rungs": [one.plain() for one in planned], "directory": loaded.recipe.output_dir}
        | ({} if path is None else {"plan": str(path)}),
        metrics={"rungs": len(planned), "flops": sum(one.flops for one in planned)},
        warnings=[warning for one in planned for warning in one.warnings],
        next=f"tuner ladder run {_shown(loaded)}", is_text=True,
    )


def run(loaded: LoadedRecipe, rung: str | None, console: Console, level: Level) -> Outcome:
    """Train every rung that is not done, or one."""
    with console.doing("planning the rungs"):
        every = rungs_of(loaded)
    chosen = chosen_of(every, rung)
    directory = Path(loaded.recipe.output_dir)
    launch.note_plan(loaded.recipe, every)
    for one in chosen:
        if one.batch.warning is not None:
            console.warn(f"{one.name}: {one.batch.warning}")
    results = launch.run_rungs(chosen, level, lambda one: _announce(console, one, every))
    for each in results:
        if each.was_done:
            console.say("skipped", f"{each.rung.name}: done, {counted(each.result.total_steps, 'step')}")
    artifacts = {"rungs": {each.rung.name: str(each.result.run_dir) for each in results}}
    metrics = {each.rung.name: each.result.metrics | {"step": each.result.step} for each in results}
    if results[-1].stopped:
        console.say("stopped", f"{results[-1].rung.name}: resume with: tuner ladder run {_shown(loaded)}")
        return Outcome(str(directory), "stopped", 75, artifacts, metrics, next=f"tuner ladder run {_shown(loaded)}")
    return Outcome(str(directory), artifacts=artifacts, metrics=metrics, next=f"tuner ladder metrics {directory}")


def benchmark(
    loaded: LoadedRecipe, rung: str, steps: int, output: str | None, console: Console, level: Level
) -> Outcome:
    """Measure some steps of a rung, and write the figures."""
    with console.doing("planning the rungs"):
        (chosen,) = chosen_of(rungs_of(loaded), rung)
    path = Path(loaded.recipe.output_dir) / launch.file_name(chosen) if output is None else input_path(output)
    launch.check_figures(path)
    found = launch.benchmarked(chosen, steps, level)
    if RankInfo.from_environment().is_main:
        launch.write_figures(path, found)
    figures, artifacts = found.plain(), {"path": str(path), "rung": chosen.name}
    warnings = [] if found.measured.shortage is None else [found.measured.shortage.line()]
    text = columns([BENCHMARK, [chosen.name, *_shown_figures(figures)]], right=range(1, len(BENCHMARK)))
    return Outcome(text, artifacts=artifacts, metrics=figures, warnings=warnings, is_table=True)


def _shown_figures(figures: Mapping[str, Any]) -> list[str]:
    mfu = figures.get("mfu")
    return [
        str(figures["steps"]), f"{figures['step_s']:.3g} s", f"{figures['tok_per_s']:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}", gib(figures["memory"]["peak_bytes"]), clock(figures["estimate_s"]),
    ]


def _announce(console: Console, rung: Rung, every: Sequence[Rung]) -> None:
    place = [one.name for one in every].index(rung.name) + 1
    console.say("rung", f"{rung.name}, {place} of {len(every)}: {rung.parameters:,} parameters without embeddings")


def _shown(loaded: LoadedRecipe) -> str:
    """The recipe as it was given, for a command to type."""
    return "RECIPE" if loaded.path is None else typed_path(loaded.path)
