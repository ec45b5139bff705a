"""`tuner prepare-data`: rows to packed, encoded, content-addressed data."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.command import (
    DebugOption,
    JsonOption,
    Outcome,
    OutputOptions,
    RecipeArgument,
    VerboseOption,
    load_for_command,
    overrides_of,
    run_command,
)
from tuner.errors import RecipeError, counted

if TYPE_CHECKING:
    from tuner.config.load import LoadedRecipe
    from tuner.data.building.prepare import PreparedInfo
    from tuner.data.building.spec import PrepareSpec
    from tuner.runtime.console import Console


def prepare_data(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            help="Show the first N rows, what is trained in brackets (piped: a JSON line per token), then stop.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the directory if it is prepared, else exit with 3; build nothing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be read and built, then stop.")] = False,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Also compute columns of a reference or teacher, as training would."),
    ] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn rows into packed, encoded data and print its directory; what is prepared already is found again."""
    from tuner.runtime.memory import calm_collector

    terminal = sys.stdout.isatty()  # the body's stdout is another one

    def body() -> Outcome:
        from tuner.runtime.console import Console

        if sum((explain is not None, check, dry_run, reference)) > 1:
            raise RecipeError(
                "--explain, --check, --dry-run and --reference exclude each other", hint="give one of them"
            )
        loaded = load_for_command(recipe, overrides_of(ctx))
        given = loaded.recipe
        console = Console(level="debug" if verbose else "info")
        with console.doing("loading tokenizer", at_once=True):
            from tuner.data.building.spec import prepare_spec

            spec = prepare_spec(given.model, given.tokenizer, given.data, given.method, given.seed)
        if explain is not None:
            return _explained(spec, explain, terminal, verbose)
        if check:
            return _checked(spec)
        if dry_run:
            return _planned(spec, console)
        if given.data.windows.is_on and not reference:
            return _prepared_windows(spec, console, str(loaded.path) if loaded.path else None)
        outcome = _prepared(spec, console, str(loaded.path) if loaded.path else None)
        return _with_reference(loaded, outcome, console, verbose) if reference else outcome

    run_command("prepare-data", OutputOptions(json, verbose, debug), calm_collector()(body))


def _prepared(spec: PrepareSpec, console: Console, recipe: str | None) -> Outcome:
    from tuner.data.building.prepare import prepare

    with console.doing("reading the sources"):
        info = prepare(spec, console)
    say_report(info, spec, console)
    metrics = {**info.report, "max_length": spec.max_length, "seconds": round(info.seconds, 3)}
    if not info.cached:
        metrics["megabytes_per_s"] = round(info.megabytes_per_s, 3)
    return Outcome(
        str(info.path),
        artifacts={"key": info.key, "cached": info.cached},
        metrics=metrics,
        warnings=list(info.warnings),
        next=f"tuner train {recipe}" if recipe else None,
    )


def _prepared_windows(spec: PrepareSpec, console: Console, recipe: str | None) -> Outcome:
    """Prepare every window that is there, each on a line of its own; the result is their directories, in order."""
    from tuner.data.building.windows import prepare_windows

    windows, warnings = [], []
    with console.doing("reading the sources"):
        for window, info in prepare_windows(spec, console):
            there = {} if info is None else {"path": str(info.path), "key": info.key, "cached": info.cached}
            windows.append({"name": window.name, "files": list(window.files), **there})
            if info is None:
                console.say("window", f"{window.name}: no rows")
                continue
            documents = info.report["train"]["documents"]
            how = "already prepared" if info.cached else f"prepared in {info.seconds:.1f} s"
            console.say("window", f"{window.name}: {counted(documents, 'document')}, {how}")
            warnings += [f"window {window.name}: {text}" for text in info.warnings]
    return Outcome(
        "\n".join(str(window["path"]) for window in windows if "path" in window),
        artifacts={"windows": windows},
        metrics={"windows": len(windows), "max_length": spec.max_length},
        warnings=warnings,
        next=f"tuner train {recipe}" if recipe else None,
        is_text=True,
    )


def _with_reference(loaded: LoadedRecipe, outcome: Outcome, console: Console, verbose: bool) -> Outcome:
    """The outcome with the directory of the reference, computed on the processes that training would have."""
    with console.doing("loading libraries"):
        from tuner.run.options import LaunchOptions
        from tuner.run.prepare_reference import prepare_reference

    options = LaunchOptions(level="debug" if verbose else "info")
    found = prepare_reference(loaded, Path(outcome.result), console, options)
    return replace(outcome, artifacts={**outcome.artifacts, "reference": str(found)})


def say_report(info: PreparedInfo, spec: PrepareSpec, console: Console) -> None:
    """Say what was prepared, as a table."""
    from tuner.data.building.report import done_line, report_lines

    if info.cached:
        console.say("prepared", f"already prepared ({info.seconds:.1f} s)")
    for label, text in report_lines(info.report, spec.examples.kind, spec.max_length, spec.data.packs_rows):
        console.say(label, text)
    if not info.cached:
        console.say("done", done_line(info.report["bytes"], info.seconds))


def _checked(spec: PrepareSpec) -> Outcome:
    from tuner.data.building.prepare import check_prepared

    path = check_prepared(spec)
    return Outcome(str(path), artifacts={"key": path.name, "cached": True})


def _planned(spec: PrepareSpec, console: Console) -> Outcome:
    from tuner.data.building.cache import cache_path, valid
    from tuner.data.building.spec import keys_of

    keys = keys_of(spec)
    path = cache_path(spec.cache_dir, "prepared", keys.prepared)
    there = valid(path, "prepared") is not None
    files = [file for source in [*keys.train, *(keys.eval or [])] for file in source.files]
    size = sum(file.size() for file in files)
    console.say("read", f"{counted(len(files), 'file')}, {size:,} bytes")
    console.say("plan", f"rows of {spec.max_length:,} tokens, longer documents: {spec.too_long}")
    console.say("prepared", "already prepared" if there else "not yet prepared")
    return Outcome(
        str(path),
        artifacts={"cached": there},
        metrics={"files": len(files), "bytes": size, "max_length": spec.max_length},
        is_text=True,
    )


def _explained(spec: PrepareSpec, count: int, terminal: bool, every_token: bool) -> Outcome:
    from tuner.cli.token_view import row_texts, token_lines
    from tuner.data.building.explain import explain

    rows = list(explain(spec, count))
    artifacts = {"rows": [[asdict(token) for token in row.tokens] for row in rows]}
    if not terminal:
        return Outcome(token_lines(rows), artifacts=artifacts, is_text=True)
    text = row_texts(rows, spec.tokenizer, not os.environ.get("NO_COLOR"), every_token)
    return Outcome(text, artifacts=artifacts, is_text=True)
