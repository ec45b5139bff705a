"""What a ladder measured at its marks: how far rungs are, the marks as a table, and the law through them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.cli.command import Outcome, input_path, load_for_command
from tuner.cli.output import columns, fitted, stdout_columns
from tuner.config.ladder import short_count
from tuner.config.load import Override
from tuner.errors import RecipeError
from tuner.ladder.fit import Estimate, Parameter, Settings, parameters_of
from tuner.ladder.fit_page import PAGE, check_output, figures_of, is_covered, shown_parameter, write_fit_page
from tuner.ladder.forecast import Forecast, ForecastQuestion, LadderHeldOut, forecast, sigmoid_parameters
from tuner.ladder.points import Point, Size, by_rung, count_in, points_of, read_points, short
from tuner.ladder.record import LadderRecord, marks_csv, places, read_ladders, read_marks, statuses, with_prefix
from tuner.ladder.rules import mark_name
from tuner.runtime.console import Console, clock

__all__ = ["ForecastQuestion", "Settings", "Where", "fit", "metrics", "status"]
CSV = ".csv"
PLACES = ("rung", "mark", "step", "tokens", "there", "checkpoint", "metrics")
STATUS = ("rung", "status", "step", "tokens", "marks", "newest mark", "loss", "time")


def ladder_path(argument: str | None, overrides: Sequence[Override] = ()) -> Path:
    """The directory of a ladder: the argument, or the `output_dir` of the recipe that it is. Raises RecipeError."""
    if argument is not None and argument != "-":
        path = input_path(argument)
        if path.is_dir():
            if overrides:
                raise RecipeError(f"{argument} is a directory, not a recipe: --{overrides[0].key} has no meaning here")
            return path
    return Path(load_for_command(argument, overrides).recipe.output_dir)


@dataclass(frozen=True)
class Where:
    """A ladder as typed: its recipe or directory, and other directories with runs of its rungs."""

    ladder: str | None
    overrides: Sequence[Override] = ()
    also: Sequence[str] = ()

    def read(self) -> LadderRecord:
        """The ladder. Raises RecipeError and DataError."""
        return read_ladders(ladder_path(self.ladder, self.overrides), [input_path(path) for path in self.also])


def status_table(found: Sequence[Mapping[str, Any]]) -> str:
    """How far each rung is."""
    def newest(rung: Mapping[str, Any]) -> tuple[str, str]:
        mark = rung["newest_mark"]
        if mark is None:
            return "-", "-"
        loss = mark["loss"]
        return mark_name(mark["multiple"], mark["phase"]), "-" if loss is None else f"{loss:.4f}"

    lines = [
        [
            rung["name"], rung["status"], f"{rung['step']:,}/{rung['total_steps']:,}",
            "-" if rung["tokens"] is None else short_count(rung["tokens"]), f"{rung['marks_reached']}/{rung['marks']}",
            *newest(rung), clock(rung["seconds"]),
        ]
        for rung in found
    ]
    return fitted([STATUS, *lines], stdout_columns(), right=(2, 3, 4, 6, 7))


def places_table(found: Sequence[Mapping[str, Any]]) -> str:
    """The marks and where they are; nothing is left out, for paths are to be copied."""
    lines = [
        [one["rung"], one["name"], f"{one['step']:,}", short_count(one["tokens"]), "yes" if one["exists"] else "no",
         one["path"], one["metrics_path"] or "-"]
        for one in found
    ]  # fmt: skip
    return columns([PLACES, *lines], right=(2, 3))


def status(where: Where, lists_marks: bool, everything: bool) -> Outcome:
    """How far each rung is, or where each mark is, or everything that was saved."""
    read = where.read()
    found, marks = statuses(read), places(read, everything)
    done = sum(one["status"] == "finished" for one in found)
    metrics = {"rungs": len(found), "finished": done}
    table = places_table(marks) if lists_marks or everything else status_table(found)
    return Outcome(table, artifacts={"rungs": found, "marks": marks}, metrics=metrics, is_table=True)


def metrics(where: Where, prefix: str) -> Outcome:
    """What was measured at each mark; of the figures besides the loss those whose names begin so."""
    marks = with_prefix(read_marks(where.read()), prefix)
    text, rows = marks_csv(marks).removesuffix("\n"), [mark.row() for mark in marks]
    return Outcome(text, artifacts={"marks": rows}, metrics={"marks": len(marks)}, is_table=True)


def fit(
    where: Where, question: ForecastQuestion, target: str | None, tokens: str | None, output: str | None
) -> Outcome:
    """Fit the law, say what it predicts of what `--target` and `--tokens` name, and write its page."""
    read = _read(where)
    page = input_path(output) if output is not None else read.directory / PAGE
    check_output(page)
    rung, size = _asked(read, target, tokens)
    found = forecast(read.points, replace(question, rung=rung, size=size))
    write_fit_page(page, read.name, found)
    _show(found, Console())
    figures = figures_of(found)
    metrics = {key: figures[key] for key in ("points", "rungs")}
    return Outcome(str(page), artifacts={"fit": figures}, metrics=metrics, warnings=found.notes)


@dataclass(frozen=True)
class _Read:
    """Points, where they are from, where their page belongs, and the sizes of rungs that are planned."""

    name: str
    points: list[Point]
    directory: Path
    planned: dict[str, Size] = field(default_factory=dict)


def _read(where: Where) -> _Read:
    """The points of a CSV, or of a ladder. Raises RecipeError and DataError."""
    source = None if where.ladder is None else input_path(where.ladder)
    if source is not None and source.suffix == CSV:
        return _Read(source.stem, read_points(source), Path.cwd())
    found = replace(where, ladder=None if source is None else str(source)).read()
    planned = {rung.name: Size(rung.parameters, rung.marks[-1].tokens) for rung in found.rungs}
    return _Read(found.name, points_of(read_marks(found)), found.directory, planned)


def _asked(read: _Read, target: str | None, tokens: str | None) -> tuple[str | None, Size | None]:
    """The target that `--target` and `--tokens` name: a rung that was trained, or a size. Raises RecipeError."""
    if target is None:
        if tokens is not None:
            raise RecipeError(
                f"--tokens {tokens}: of which model?", hint=f"add its size: --target 1B --tokens {tokens}"
            )
        return None, None
    trained = {point.rung: point.parameters for point in read.points}
    if tokens is None and target in trained:
        return target, None
    if tokens is None and target in read.planned:
        return None, read.planned[target]
    if tokens is None:
        rungs = ", ".join(dict.fromkeys([*trained, *read.planned]))
        size = target if _is_count(target) else "1B"
        raise RecipeError(
            f"--target {target}: no rung of that name, and a size needs --tokens",
            hint=f"write --target {size} --tokens 20B, or one of the rungs: {rungs}",
        )
    planned = read.planned.get(target)
    parameters = trained.get(target) or (planned.parameters if planned else _count("--target", target))
    return None, Size(parameters, _count("--tokens", tokens))


def _is_count(text: str) -> bool:
    try:
        return count_in(text) > 0
    except ValueError:
        return False


def _count(flag: str, text: str) -> float:
    try:
        return count_in(text)
    except ValueError as error:
        raise RecipeError(f"{flag} {text} {error}", hint=f"write {flag} 20B or {flag} 1.5e9") from None


def _show(found: Forecast, console: Console) -> None:
    """The law, its error on rungs that were left out, and the target, for people."""
    fit = found.fit
    console.say("law", f"{fit.form.text} · {len(fit.points)} points of {len(by_rung(fit.points))} rungs")
    for line in _parameter_lines(parameters_of(fit)):
        console.line(line)
    if found.left_out:
        console.say("left out", "each rung predicted from the others")
        for line in _left_out_lines(found.left_out):
            console.line(line)
    for one in found.scores:
        console.say("sigmoid", f"{one.figure} over {fit.figure} · {len(one.points)} points")
        for line in _parameter_lines(sigmoid_parameters(one)):
            console.line(line)
    _show_target(found, console)


def _show_target(found: Forecast, console: Console) -> None:
    if found.target is None or found.loss is None:
        return
    size, level = found.target, f"{found.fit.settings.level:.0%}"
    text = f"{short(size.parameters)} parameters after {short(size.tokens)} tokens"
    console.say("target", f"{text}: {found.fit.figure} {_between(found.loss)} ({level} interval)")
    for figure, value in found.predicted_scores.items():
        measured = found.measured_scores.get(figure)
        console.line(f"{figure} {_between(value)}" + ("" if measured is None else f" · measured {measured:.4g}"))
    if (one := found.checked) is not None:
        where = "inside" if is_covered(one) else "outside"
        console.line(f"measured {one.measured:.4f}: predicted {one.error:+.2%} off, {where} the interval")


def _parameter_lines(parameters: Sequence[Parameter]) -> list[str]:
    lines = []
    for one in parameters:
        if one.why:
            lines.append([one.name, "-", f"not identified: {one.why}"])
            continue
        low, high = shown_parameter(one.name, one.value.low), shown_parameter(one.name, one.value.high)
        lines.append([one.name, shown_parameter(one.name, one.value.value), f"{low} to {high}"])
    return columns(lines, right=(1,)).split("\n")


def _left_out_lines(left: Sequence[LadderHeldOut]) -> list[str]:
    lines = [["rung", "parameters", "tokens", "measured", "predicted", "interval", "error", ""]]
    lines += [
        [
            one.rung, short(one.size.parameters), short(one.size.tokens), f"{one.measured:.4f}",
            f"{one.predicted.value:.4f}", f"{one.predicted.low:.4f} to {one.predicted.high:.4f}", f"{one.error:+.2%}",
            "" if is_covered(one) else "outside",
        ]
        for one in left
    ]  # fmt: skip
    return columns(lines, right=range(1, 7)).split("\n")


def _between(value: Estimate) -> str:
    return f"{value.value:.4f}, {value.low:.4f} to {value.high:.4f}"
