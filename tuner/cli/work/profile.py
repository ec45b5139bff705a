"""What `tuner profile` does and shows: a prediction, what fits, or a measurement."""

import time
from dataclasses import dataclass
from pathlib import Path

from tuner.cli.command import Outcome
from tuner.cli.output import columns, fitted, stdout_columns
from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.errors import MemoryLimitError
from tuner.profile.choose import predict_settled
from tuner.profile.devices import parse_memory
from tuner.profile.fit import SHOWN, KeptAnswer, fit, keep, key_of, known
from tuner.profile.measure import Measurement, MeasureOptions
from tuner.profile.predict import Target, predict
from tuner.profile.prediction import Prediction
from tuner.profile.report import check_output, choices_table, flags, parts_table, plain, sentence, table, write_report
from tuner.profile.search import lines_to_write
from tuner.run.measure import measure_recipe, target_of, with_host_memory
from tuner.runtime.console import LABEL_WIDTH, Console, Level, wrapped
from tuner.runtime.dist import RankInfo
from tuner.setup.settled import with_whole_batches


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


def profile(loaded: LoadedRecipe, options: ProfileOptions, console: Console, level: Level) -> Outcome:
    """Predict, find what fits, or measure, as the options say."""
    if options.output is not None:
        check_output(options.output)
    if options.measure is not None or options.dry_run:
        return _measured(loaded, options, console, level)
    return _fitted(loaded, options, console) if options.fit is not None else _predicted(loaded, options, console)


def _target(loaded: LoadedRecipe, options: ProfileOptions, limit: str | None, option: str) -> Target:
    found = target_of(loaded.recipe, options.device, options.processes, limit, option)
    return found if options.host_memory is None else with_host_memory(found, options.host_memory)


def _predicted(loaded: LoadedRecipe, options: ProfileOptions, console: Console) -> Outcome:
    with console.doing("tracing a step on tensors without memory"):
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
    given = {"fit": options.memory or True, "device": options.device, "processes": options.processes}
    given["host-memory"] = options.host_memory
    flags = " ".join(f"--{flag}" if value is True else f"--{flag} {value}" for flag, value in given.items() if value)
    lines = lines_to_write(loaded.recipe)
    hint = f"let it choose: tuner profile RECIPE {flags}"
    return hint + (f"; or write what changes results: {'; or '.join(lines)}" if lines else "")


def _lines(said: str) -> str:
    """The result on as many lines as the terminal needs that it goes to; on one anywhere else."""
    return "\n".join(wrapped(said, stdout_columns()))


def _fitted(loaded: LoadedRecipe, options: ProfileOptions, console: Console) -> Outcome:
    with console.doing("tracing steps on tensors without memory"):
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


def _searched(whole: Recipe, target: Target, console: Console) -> KeptAnswer:
    """Search, with a line for each prediction."""
    began = time.monotonic()
    found = fit(whole, target, lambda line: console.say("tried", line))
    took_s = time.monotonic() - began
    best, *others = found.choices[:SHOWN]
    runners_up = [{"overrides": choice.overrides, **plain(choice.prediction)} for choice in others]
    metrics = {**plain(best.prediction), "runners_up": runners_up, **found.as_json()}
    warnings = [*best.prediction.warnings, *found.warnings()]
    table = choices_table(found.choices)
    return KeptAnswer(table, flags(best), metrics, warnings, best.overrides, found.predictions, took_s)


def _measured(loaded: LoadedRecipe, options: ProfileOptions, console: Console, level: Level) -> Outcome:
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
    loaded: LoadedRecipe, options: ProfileOptions, console: Console, measured: Measurement | None,
    predicted: Prediction | None,
) -> dict[str, str]:
    """Write the page where one is wanted; returns its files by what they are."""
    if options.output is None or not RankInfo.from_environment().is_main:
        return {}
    written = write_report(options.output, loaded.recipe, measured, predicted)
    artifacts = {name: str(path) for name, path in written.items()}
    console.say("report", artifacts["report"])
    return artifacts
