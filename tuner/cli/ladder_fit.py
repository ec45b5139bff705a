"""`tuner ladder fit`: the law through a ladder's points, what it predicts, and one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.command import Outcome, command, input_path, overrides_of
from tuner.cli.ladder_view import ladder_path
from tuner.cli.table import columns
from tuner.config.numbers import parse_number
from tuner.errors import RecipeError

if TYPE_CHECKING:
    from tuner.ladder.fit import Estimate, Parameter
    from tuner.ladder.forecast import Forecast
    from tuner.ladder.held_out import HeldOut
    from tuner.ladder.law import Size
    from tuner.ladder.points import Point
    from tuner.runtime.console import Console

CSV = ".csv"


@command("ladder fit")
def fit(
    ctx: typer.Context,
    ladder: Annotated[
        str | None,
        typer.Argument(
            metavar="[LADDER]",
            help="Recipe or directory of a ladder, or a CSV of points; - reads its path; default ./recipe.yaml.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Rung, which is left out of the fit and predicted, or parameters such as 1B, with --tokens."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens that the target is trained on, such as 20B.")] = None,
    loss: Annotated[str, typer.Option(help="Figure that the law is fitted to.")] = "loss",
    score: Annotated[
        list[str] | None,
        typer.Option(help="Figure between 0 and 1 that is predicted from the loss by a sigmoid; may be repeated."),
    ] = None,
    chance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Score of guessing, which fixes the sigmoid's floor.")
    ] = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.99, help="Share of cases that intervals hold.")] = 0.9,
    samples: Annotated[int, typer.Option(min=100, max=20000, help="Samples of the bootstrap.")] = 1000,
    output: Annotated[
        str | None, typer.Option(help="The page to write; default fit.html in the ladder, or here for a CSV.")
    ] = None,
) -> Outcome:
    """Fit L = E + A/N^a + B/D^b to a ladder's rungs and predict a size that was not trained, with its interval."""
    from tuner.ladder.fit import Settings
    from tuner.ladder.fit_page import PAGE, check_output, figures_of, write_fit_page
    from tuner.ladder.forecast import Question, forecast
    from tuner.runtime.console import Console

    read = _read(ladder, ctx)
    page = input_path(output) if output is not None else read.directory / PAGE
    check_output(page)
    asked = _asked(read, target, tokens)
    settings = Settings(level, samples)
    found = forecast(read.points, Question(settings, loss, tuple(score or ()), chance, asked.rung, asked.size))
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


@dataclass(frozen=True)
class _Asked:
    """The target: a rung that was trained, or a size."""

    rung: str | None = None
    size: Size | None = None


def _read(argument: str | None, ctx: typer.Context) -> _Read:
    """The points of a CSV, or of a ladder. Raises RecipeError and DataError."""
    from tuner.ladder.law import Size
    from tuner.ladder.marks import read_marks
    from tuner.ladder.points import point_of, read_points
    from tuner.ladder.record import read_ladder

    source = None if argument is None else input_path(argument)
    if source is not None and source.suffix == CSV:
        return _Read(source.stem, read_points(source), Path.cwd())
    found = read_ladder(ladder_path(None if source is None else str(source), overrides_of(ctx)))
    planned = {rung.name: Size(rung.parameters, rung.marks[-1].tokens) for rung in found.rungs}
    return _Read(found.name, [point_of(mark) for mark in read_marks(found)], found.directory, planned)


def _asked(read: _Read, target: str | None, tokens: str | None) -> _Asked:
    """What `--target` and `--tokens` name. Raises RecipeError."""
    from tuner.ladder.law import Size

    if target is None:
        if tokens is not None:
            raise RecipeError(
                f"--tokens {tokens}: of which model?", hint=f"add its size: --target 1B --tokens {tokens}"
            )
        return _Asked()
    trained = {point.rung: point.parameters for point in read.points}
    if tokens is None and target in trained:
        return _Asked(rung=target)
    if tokens is None and target in read.planned:
        return _Asked(size=read.planned[target])
    if tokens is None:
        rungs = ", ".join(dict.fromkeys([*trained, *read.planned]))
        size = target if _is_count(target) else "1B"
        raise RecipeError(
            f"--target {target}: no rung of that name, and a size needs --tokens",
            hint=f"write --target {size} --tokens 20B, or one of the rungs: {rungs}",
        )
    planned = read.planned.get(target)
    parameters = trained.get(target) or (planned.parameters if planned else _count("--target", target))
    return _Asked(size=Size(parameters, _count("--tokens", tokens)))


def _is_count(text: str) -> bool:
    try:
        return _count("--target", text) > 0
    except RecipeError:
        return False


def _count(flag: str, text: str) -> float:
    try:
        value = float(parse_number(text))
    except (ValueError, OverflowError):
        raise RecipeError(f"{flag} {text} is not a number", hint=f"write {flag} 20B or {flag} 1.5e9") from None
    if not 1 <= value < 1e18:
        raise RecipeError(f"{flag} {text} is no count", hint=f"write {flag} 20B or {flag} 1.5e9")
    return value


def _show(found: Forecast, console: Console) -> None:
    """The law, its error on rungs that were left out, and the target, for people."""
    from tuner.ladder import score
    from tuner.ladder.fit import parameters_of
    from tuner.ladder.points import by_rung

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
        for line in _parameter_lines(score.parameters_of(one)):
            console.line(line)
    _show_target(found, console)


def _show_target(found: Forecast, console: Console) -> None:
    from tuner.ladder.fit_page import is_covered
    from tuner.ladder.points import short

    if found.target is None or found.loss is None:
        return
    size, level = found.target, f"{found.fit.settings.level:.0%}"
    text = f"{short(size.parameters)} parameters after {short(size.tokens)} tokens"
    console.say("target", f"{text}: {found.fit.figure} {_between(found.loss)} ({level} interval)")
    for figure, value in found.predicted_scores.items():
        measured = found.measured_scores.get(figure)
        console.line(f"{figure} {_between(value)}" + ("" if measured is None else f" · measured {measured:.4g}"))
    if found.checked is not None:
        one = found.checked
        where = "inside" if is_covered(one) else "outside"
        console.line(f"measured {one.measured:.4f}: predicted {one.error:+.2%} off, {where} the interval")


def _parameter_lines(parameters: Sequence[Parameter]) -> list[str]:
    from tuner.ladder.fit_page import shown_parameter

    lines = []
    for one in parameters:
        if one.why:
            lines.append([one.name, "-", f"not identified: {one.why}"])
            continue
        low, high = shown_parameter(one.name, one.value.low), shown_parameter(one.name, one.value.high)
        lines.append([one.name, shown_parameter(one.name, one.value.value), f"{low} to {high}"])
    return columns(lines, right=(1,)).split("\n")


def _left_out_lines(left: Sequence[HeldOut]) -> list[str]:
    from tuner.ladder.fit_page import is_covered
    from tuner.ladder.points import short

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
