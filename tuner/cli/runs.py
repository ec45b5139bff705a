"""`tuner runs`: the directories of runs."""

import calendar
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as RichConsole
from rich.text import Text

from tuner.cli.command import Outcome, command, input_path
from tuner.cli.named import run_path
from tuner.cli.output import fitted, stdout_columns
from tuner.config.yaml import flow
from tuner.errors import DataError, RecipeError, VerificationError, counted
from tuner.rundir.checkpoints import any_valid, problem_of, way_to_whole
from tuner.rundir.curves import LETTERS, Chart, charts, draw
from tuner.rundir.layout import CHECKPOINTS, CURVES
from tuner.rundir.record import (
    Run,
    differing,
    find_runs,
    read_run,
    read_runs,
    remove_runs,
    source_losses,
    sources_of,
    summary,
)
from tuner.rundir.run_json import TIME_FORMAT
from tuner.runtime.console import LABEL_WIDTH, Console, clock, escape
from tuner.runtime.startup import in_words
from tuner.stages import is_url

FIGURES = {
    "status": "status", "step": "step", "loss": "loss", "eval_loss": "eval", "best_eval_loss": "best eval",
    "tokens": "tokens", "seconds": "time",
}  # fmt: skip
"""What the tables show of a run's summary, and its heading."""
TEXT = frozenset({"status"})
SHOWN_CHARACTERS, SHORTEST_VALUE = 40, 14
"""Columns of a value at most, and at least where a narrow terminal cuts it."""
DRAWN = ("loss", "eval", "accuracy", "eval accuracy", "margin", "lr", "grad_norm", "tok_per_s")
"""Charts that the terminal shows; the page shows all."""
CHART_ROWS, TWO_CHARTS, MOST_COLUMNS = 6, 100, 160


@command("runs list")
def list_runs(directory: str = "runs") -> Outcome:
    """List runs, oldest first: status, steps, losses, tokens and time."""
    path = input_path(directory)
    runs, damaged = find_runs(path)
    found = [summary(run) for run in runs]
    names = [os.path.relpath(run.path, path) if run.path != path else run.name for run in runs]
    lines = [[*_row(name, item), _local(item["started"])] for name, item in zip(names, found, strict=True)]
    text = _table([["run", *FIGURES.values(), "started"], *lines]) if runs else f"no runs in {path}"
    if runs:
        _say_what_was_checked()
    return Outcome(text, artifacts={"runs": found}, metrics={"runs": len(runs)}, warnings=damaged, is_table=True)


@command("runs show")
def show(run: str) -> Outcome:
    """Show a run: its figures, its launches, its checkpoints and what it ran on."""
    found = read_run(run_path(run))
    artifacts = {
        "run": summary(found), "eval_sources": source_losses(found), "launches": found.launches,
        "checkpoints": [str(path) for path in found.checkpoints], "recipe": found.recipe,
    }
    _say_what_was_checked()
    return Outcome(_shown(found), artifacts=artifacts, warnings=found.problems, is_table=True)


@command("runs compare")
def compare(runs: list[str]) -> Outcome:
    """Compare runs: the keys in which their recipes differ, losses, tokens and time."""
    found, left_out = _open(runs)
    recipes = [run.recipe for run in found]
    keys = differing(recipes)
    summaries = [summary(run) for run in found]
    values = [{key: recipe[key] for key in keys if key in recipe} for recipe in recipes]
    own = list(dict.fromkeys(name for item in summaries for name in item["eval_figures"]))
    lines = [["run", *keys, *FIGURES.values(), *(f"eval {name}" for name in own)]]
    most = _value_width(lines[0], len(found))
    for name, item, recipe in zip(_names(found), summaries, values, strict=True):
        shown = [_cut(flow(recipe[key]), most) if key in recipe else "-" for key in keys]
        first, *rest = _row(name, item)
        figures = item["eval_figures"]
        lines.append([first, *shown, *rest, *(f"{figures[one]:.4f}" if one in figures else "-" for one in own)])
    across = [*zip(*lines, strict=True)]
    text = _table(lines, len(keys)) if len(found) >= len(lines[0]) else fitted(across, stdout_columns())
    compared = [{**item, "recipe": recipe} for item, recipe in zip(summaries, values, strict=True)]
    return Outcome(text, artifacts={"runs": compared, "differing": keys}, warnings=left_out, is_table=True)


@command("runs plot")
def plot(runs: list[str], output: str | None = None, smoothing: float | None = None) -> Outcome:
    """Draw the curves of runs in the terminal, and as one HTML page that needs no network."""
    from tuner.rundir.curves import write_page

    found, left_out = _open(runs)
    drawn = charts(found)
    if not drawn:
        raise DataError("there is nothing to draw yet: no step was written", hint="wait for the first steps")
    default = found[0].path / CURVES if len(found) == 1 else Path(CURVES)
    page = input_path(output) if output is not None else default.absolute()
    write_page(page, found, drawn, smoothing)
    _draw(drawn, _names(found))
    artifacts = {"charts": [chart.key for chart in drawn]}
    return Outcome(str(page), artifacts=artifacts, metrics={"runs": len(found)}, warnings=left_out)


@command("runs verify")
def verify(runs: list[str]) -> Outcome:
    """Compare every file of every checkpoint with the SHA-256 that its manifest noted; exit 6 names what differs."""
    from tuner.checkpoint.open import open_checkpoint

    found, left_out = _open(runs, "all")
    checkpoints, damaged = [path for run in found for path in run.every_checkpoint], []
    began: dict[str, None] = {}
    for path in checkpoints:
        try:
            info = open_checkpoint(path)
            began |= dict.fromkeys(f"{path.parent.parent.name} was given {line}" for line in sources_of(info.meta))
        except DataError as error:
            damaged.append(error.message)
    if damaged:
        places = [run.path / CHECKPOINTS for run in found if run.damage is not None]
        raise VerificationError(
            "\n  ".join([f"{len(damaged)} of {len(checkpoints)} checkpoints are damaged or gone:", *damaged]),
            hint="      ".join(way_to_whole(place, any_valid(place)) for place in places) or None,
        )
    return Outcome(
        "\n".join([f"{counted(len(checkpoints), 'checkpoint')}: all as they were written", *began]),
        artifacts={"verified": [str(path) for path in checkpoints], **({"began_with": list(began)} if began else {})},
        metrics={"checkpoints": len(checkpoints)},
        warnings=[*left_out, *(problem for run in found for problem in run.problems)], is_text=True,
    )


@command("runs rm")
def rm(runs: list[str]) -> Outcome:
    """Remove runs with their checkpoints and exports; one that is in use, or something else, is refused."""
    if stored := next(filter(is_url, runs), None):
        hint = "remove what is below it with the store's own tools"
        raise RecipeError(f"{stored}: runs in object stores are not removed by this command", hint=hint)
    removed = [str(path) for path in remove_runs([run_path(run, recipes=False) for run in runs])]
    return Outcome("\n".join(removed), artifacts={"removed": removed}, is_text=True)


def _say_what_was_checked() -> None:
    Console().say("checked", "last checkpoints checked by size; tuner runs verify RUN reads every byte")


def _open(runs: Sequence[str], extent: Literal["look", "all"] = "look") -> tuple[list[Run], list[str]]:
    """The runs, and a warning about each directory in which none was ever started: `runs/*` names those too."""
    return read_runs(dict.fromkeys(run_path(run, extent=extent) for run in runs))


def _names(runs: Sequence[Run]) -> list[str]:
    """The runs' names, with as much of their paths as tells them apart."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [os.path.relpath(run.path) for run in runs]


def _row(name: str, item: dict[str, Any]) -> list[str]:
    return [name, *(_figure(item, key) for key in FIGURES)]


def _local(text: str | None) -> str:
    """A time of a record, which is in UTC, in the local zone: `2026-03-01 14:05`; `...` where there is none."""
    if not text:
        return "..."
    seconds = calendar.timegm(time.strptime(text, TIME_FORMAT))
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _figure(item: dict[str, Any], key: str) -> str:
    """One figure of a summary for people."""
    value = item[key]
    if key == "step":
        return f"{value:,}" + (f"/{item['total_steps']:,}" if item["total_steps"] else "")
    if key == "best_eval_loss":
        return "-" if value is None else f"{value:.4f} at {item['best_eval_step']:,}"
    if key == "seconds":
        return clock(value)
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _table(lines: Sequence[Sequence[str]], keys: int = 0) -> str:
    """Runs one below the other; figures to the right, `keys` columns after the name are texts."""
    heading = lines[0]
    texts = {i for i, name in enumerate(heading) if i <= keys or name in {"status", "started"}}
    return fitted(lines, stdout_columns(), right=[i for i in range(len(heading)) if i not in texts])


def _value_width(headings: Sequence[str], runs: int) -> int:
    """Columns of a value, so that as many runs stand side by side where the terminal has room for all of them."""
    each = (stdout_columns() - max(map(len, headings))) // runs - 2
    return min(SHOWN_CHARACTERS, each) if each >= SHORTEST_VALUE else SHOWN_CHARACTERS


def _cut(text: str, most: int) -> str:
    """A value in so many columns; of a path its end is shown."""
    if len(text) <= most:
        return text
    return f"…{text[1 - most :]}" if text.startswith("/") else f"{text[: most - 1]}…"


def _shown(run: Run) -> str:
    """A run line by line."""
    item, recipe = summary(run), run.recipe
    lines = [("run", str(run.path)), ("status", item["status"])]
    if recipe:
        kind = recipe.get("adapter.kind")
        lines.append(("model", f"{recipe.get('model.name_or_path')}, {'all trained' if kind == 'none' else kind}"))
    lines.append(("step", f"{_figure(item, 'step')}  {_figure(item, 'tokens')} tokens  {_figure(item, 'seconds')}"))
    lowest = "" if item["best_eval_loss"] is None else f"  best eval {_figure(item, 'best_eval_loss')}"
    lines.append(("loss", f"{_figure(item, 'loss')}  eval {_figure(item, 'eval_loss')}{lowest}"))
    if item["eval_figures"]:
        lines.append(("figures", "  ".join(f"{name} {value:.4f}" for name, value in item["eval_figures"].items())))
    for task, figures in item["task_figures"].items():
        lines.append(("task", f"{task}  {'  '.join(f'{name} {value:.4f}' for name, value in figures.items())}"))
    best = run.record.get("best")
    if best and best["metric"] != "eval/loss":
        lines.append(("best", f"{best['metric']} {best['value']:.4f} at {best['step']:,}"))
    lines += [("eval", f"{loss:.4f}  {name}") for name, loss in source_losses(run).items()]
    lines += [(f"launch {number}", _launch(launch)) for number, launch in enumerate(run.launches, 1)]
    lines += [_saved(run, path) for path in run.every_checkpoint]
    newest = run.launches[-1] if run.launches else {}
    if newest.get("command"):
        lines.append(("command", _command(newest["command"])))
    versions = newest.get("versions", {})
    lines.append(("versions", "  ".join(f"{name} {version}" for name, version in versions.items())))
    return "\n".join(f"{label:<{LABEL_WIDTH}}{escape(str(text))}" for label, text in lines)


def _saved(run: Run, path: Path) -> tuple[str, str]:
    """A checkpoint on one line, with what is wrong with it."""
    name, problem = str(path.relative_to(run.path)), problem_of(path)
    return ("saved", name) if problem is None else ("damaged", f"{name}  {problem}")


def _command(words: Sequence[str]) -> str:
    """A command line as it could be typed again; `python -m tuner` is recorded as the path of its file."""
    program, *rest = words
    return shlex.join(["tuner" if os.path.basename(program) in {"tuner", "__main__.py"} else program, *rest])


def _launch(launch: dict[str, Any]) -> str:
    """One launch on one line: when, from where to where, how it ended, on what and from which commit."""
    git = launch.get("git") or {}
    changes = f" with changes ({git['diff']})" if git.get("diff") else " with changes" if git.get("dirty") else ""
    commit = f"commit {str(git.get('commit'))[:12]}{changes}" if git else ""
    parts = [
        f"{_local(launch.get('started'))} to {_local(launch.get('ended'))}",
        f"step {launch.get('from_step', 0)} to {launch.get('step', '...')}",
        " ".join(str(part) for part in (launch.get("status"), launch.get("why")) if part),
        f"{launch.get('world_size', 1)} x {launch.get('device', '?')}", commit,
        f"start {in_words(launch['start_s'])}" if launch.get("start_s") else "",
    ]
    return "  ".join(part for part in parts if part)


def _draw(charts: Sequence[Chart], names: Sequence[str]) -> None:
    """Draw the charts on stderr, two side by side where there is room; NO_COLOR gives letters to several runs."""
    colours = ("blue", "yellow", "green", "magenta", "cyan", "red")
    console = RichConsole(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    letters = len(names) > 1 and (console.color_system is None or console.no_color)
    width = min(console.width, MOST_COLUMNS)
    across = 2 if width >= TWO_CHARTS else 1
    drawn = [draw(c, width // across - across, CHART_ROWS, letters) for c in charts if c.key in DRAWN]
    styles = [colours[number % len(colours)] for number in range(len(names))]
    for start in range(0, len(drawn), across):
        for parts in zip(*drawn[start : start + across], strict=True):
            line = Text()
            for number, spans in enumerate(parts):
                line.append(" " * max(0, number * (width // across) - line.cell_len))
                for text, run in spans:
                    line.append(text, style="" if run is None or letters else styles[run])
            console.print(line)
    for number, name in enumerate(names if len(names) > 1 else []):
        mark = LETTERS[number % len(LETTERS)] if letters else "━━"
        console.print(Text.assemble((mark, "" if letters else styles[number]), f" {escape(name)}"))
