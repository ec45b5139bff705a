"""`tuner profile`: what a run needs and costs, predicted for any device, or measured on a few of its own steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.command import Outcome, RecipeArgument, VerboseOption, command, load_for_command, overrides_of
from tuner.cli.table import columns, fitted, stdout_columns
from tuner.errors import MemoryLimitError, RecipeError

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.config.recipe import Recipe
    from tuner.profile.kept import Answer
    from tuner.profile.measurement import Measurement
    from tuner.profile.predict import Target
    from tuner.profile.prediction import Prediction
    from tuner.runtime.console import Console, Level


@dataclass(frozen=True)
class ProfileOptions:
    """The options of the command, as typed."""

    device: str | None
    processes: str | None
    memory: str | None
    fit: str | None
    measure: int | None
    output: Path | None
    dry_run: bool
    host_memory: str | None = None

    def check(self) -> None:
        """Raise RecipeError for options that exclude each other."""
        if self.fit is not None and self.output is not None:
            raise RecipeError(
                "--fit cannot be combined with --output",
                hint="leave out --output, and write the page with the flags that --fit prints",
            )
        if self.fit and self.memory is not None:
            raise RecipeError("--fit SIZE cannot be combined with --memory", hint="--fit says how much memory there is")
        if (self.measure is not None or self.dry_run) and (
            self.fit is not None or self.device or self.processes or self.host_memory
        ):
            raise RecipeError(
                "--measure runs on this machine's device",
                hint="leave out --device, --processes, --host-memory and --fit, or --measure",
            )


@command("profile")
def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    device: Annotated[
        str | None,
        typer.Option(help="Predict for this device, e.g. h100-80g or cpu; default: the one in this machine."),
    ] = None,
    processes: Annotated[
        str | None, typer.Option(help="Predict for this many processes, e.g. 8, or 4x8 on four machines.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Judge each process against this much memory, e.g. 24GiB, instead of what is free."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="[SIZE]", help="Find the fastest setting that fits the device, or SIZE for each process (24GiB)."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each machine's host, e.g. 128GiB, for what is kept there; default: the device's share."
        ),
    ] = None,
    measure: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take N real steps and measure them; predicts nothing.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report here: report.html, report.json and a trace.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured and measure nothing.")] = False,
    verbose: VerboseOption = False,
) -> Outcome:
    """Predict memory and time of a recipe, find what fits, or measure; no run directory is touched."""
    options = ProfileOptions(device, processes, memory, fit, measure, output, dry_run, host_memory)
    options.check()
    loaded = load_for_command(recipe, overrides_of(ctx))
    from tuner.config.ladder import require_one_run

    require_one_run(loaded.recipe.ladder)
    from tuner.runtime.console import Console
    from tuner.runtime.dist import RankInfo

    level: Level = "debug" if verbose else "info"
    console = Console(RankInfo.from_environment().is_main, level)
    with console.doing("loading torch", at_once=True):
        from tuner.profile.report import check_output

    if output is not None:
        check_output(output)
    if measure is not None or dry_run:
        return _measured(loaded, options, console, level)
    return _fitted(loaded, options, console) if fit is not None else _predicted(loaded, options, console)


def _target(loaded: LoadedRecipe, options: ProfileOptions, limit: str | None, option: str) -> Target:
    from tuner.run.measure import target_of, with_host_memory

    found = target_of(loaded.recipe, options.device, options.processes, limit, option)
    return found if options.host_memory is None else with_host_memory(found, options.host_memory)


def _predicted(loaded: LoadedRecipe, options: ProfileOptions, console: Console) -> Outcome:
    from tuner.runtime.console import LABEL_WIDTH

    with console.doing("tracing a step on tensors without memory"):
        from tuner.profile.choose import predict_settled
        from tuner.profile.report import plain, sentence, table

        settled, found = predict_settled(loaded, _target(loaded, options, options.memory, "--memory"))
    for key, reason in settled.reasons.items():
        console.say("settled", f"{key} {settled.values[key]}: {reason}")
    lines = table(found)
    console.say("memory", fitted(lines, console.width - LABEL_WIDTH, right=range(1, len(lines[0]))))
    console.say("assumed", "\n".join(found.assumptions))
    artifacts = _report(loaded, options, console, None, found)
    if found.refuses:
        raise MemoryLimitError(f"predicted {sentence(found)}", hint=_hint(loaded, options))
    said = _lines(f"predicted {sentence(found)}")
    return Outcome(said, artifacts=artifacts, metrics=plain(found), warnings=list(found.warnings), is_text=True)


def _hint(loaded: LoadedRecipe, options: ProfileOptions) -> str:
    from tuner.profile.means import lines_to_write

    given = {"fit": options.memory or True, "device": options.device, "processes": options.processes}
    given["host-memory"] = options.host_memory
    flags = " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in given.items() if value)
    lines = lines_to_write(loaded.recipe)
    hint = f"let it choose: tuner profile RECIPE {flags}"
    return hint + (f"; or write what changes results: {'; or '.join(lines)}" if lines else "")


def _lines(said: str) -> str:
    """The result on as many lines as the terminal needs that it goes to; on one anywhere else."""
    from tuner.runtime.console import wrapped

    return "\n".join(wrapped(said, stdout_columns()))


def _fitted(loaded: LoadedRecipe, options: ProfileOptions, console: Console) -> Outcome:
    with console.doing("tracing steps on tensors without memory"):
        from tuner.profile.kept import keep, key_of, known
        from tuner.setup.settled import with_whole_batches

        limit, option = (options.fit, "--fit") if options.fit else (options.memory, "--memory")
        target = _target(loaded, options, limit, option)
        whole = with_whole_batches(loaded, target.rank_info.world_size).recipe
        key = key_of(whole, target)
        answer = before = known(key, whole)
        if answer is None:
            answer = _searched(whole, target, console)
            keep(key, whole, answer)
    console.say("fit", columns(answer.table, right=(1, 2, 3)))
    how = f"{answer.predictions} predictions in {answer.took_s:.1f} s"
    console.say("searched", how if before is None else f"nothing: the same was asked before ({how})")
    metrics = {**answer.metrics, "searched_s": answer.took_s if before is None else 0.0}
    overrides = {"overrides": answer.overrides}
    return Outcome(answer.flags, artifacts=overrides, metrics=metrics, warnings=answer.warnings, is_text=True)


def _searched(whole: Recipe, target: Target, console: Console) -> Answer:
    """Search, with a line for each prediction."""
    from tuner.profile.fit import SHOWN, fit
    from tuner.profile.kept import Answer
    from tuner.profile.report import choices_table, flags, plain

    began = time.monotonic()
    found = fit(whole, target, lambda line: console.say("tried", line))
    took_s = time.monotonic() - began
    best, *others = found.choices[:SHOWN]
    runners_up = [{"overrides": choice.overrides, **plain(choice.prediction)} for choice in others]
    metrics = {**plain(best.prediction), "runners_up": runners_up, **found.as_json()}
    warnings = [*best.prediction.warnings, *found.warnings()]
    table = choices_table(found.choices)
    return Answer(table, flags(best), metrics, warnings, best.overrides, found.predictions, took_s)


def _measured(loaded: LoadedRecipe, options: ProfileOptions, console: Console, level: Level) -> Outcome:
    from tuner.runtime.dist import RankInfo

    with console.doing("loading transformers"):
        from tuner.profile.devices import parse_memory
        from tuner.profile.measure import MeasureOptions
        from tuner.profile.predict import predict
        from tuner.profile.report import parts_table
        from tuner.run.measure import measure_recipe

    limit, steps = None if options.memory is None else parse_memory("--memory", options.memory), options.measure or 1
    output = None if options.output is None else options.output.absolute()
    measured = measure_recipe(loaded, MeasureOptions(steps, limit, output, options.dry_run), level)
    found = measured.found
    if found is None:
        metrics = {"total_steps": measured.total_steps, "steps": steps, "dry_run": True}
        return Outcome("not measured: --dry-run", metrics=metrics, is_text=True)
    console.say("memory", parts_table(found))
    console.say("time", found.time_text())
    predicted = None
    if options.output is not None and not RankInfo.is_given():  # by now the data is prepared
        with console.doing("predicting the same step"):
            predicted = predict(loaded.recipe, _target(loaded, options, options.memory, "--memory"))
    artifacts = _report(loaded, options, console, found, predicted)
    if found.shortage is not None:
        console.say("held", found.shortage.table(), "warning")
        raise MemoryLimitError(found.shortage.line(), hint=found.shortage.hint())
    if not found.fits:
        raise MemoryLimitError(f"measured {found.text()}", hint=_hint(loaded, options))
    return Outcome(_lines(f"measured {found.text()}"), artifacts=artifacts, metrics=found.as_json(), is_text=True)


def _report(
    loaded: LoadedRecipe,
    options: ProfileOptions,
    console: Console,
    measured: Measurement | None,
    predicted: Prediction | None,
) -> dict[str, str]:
    """Write the page where one is wanted; returns its files by what they are."""
    from tuner.profile.report import write_report
    from tuner.runtime.dist import RankInfo

    if options.output is None or not RankInfo.from_environment().is_main:
        return {}
    written = write_report(options.output, loaded.recipe, measured, predicted)
    artifacts = {name: str(path) for name, path in written.items()}
    console.say("report", artifacts["report"])
    return artifacts
