"""`tuner prepare-data`: rows to packed, encoded, content-addressed data."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.session import (
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

if TYPE_CHECKING:
    from tuner.data.explain import TokenView
    from tuner.data.prepare import PreparedInfo, PrepareRequest
    from tuner.runtime.console import Console


def prepare_data(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    explain: Annotated[
        int | None,
        typer.Option("--explain", min=1, help="Show the first N rows with their trained parts in brackets, and stop."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be read and built, and stop.")] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn rows into packed, encoded data; print its directory. Again, it is already prepared."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def body() -> Outcome:
        from tuner.data.request import prepare_request
        from tuner.runtime.console import Console

        loaded = load_for_command(recipe, overrides_of(ctx))
        wish = loaded.recipe
        request = prepare_request(wish.model, wish.tokenizer, wish.data, wish.method, wish.seed)
        console = Console(level="debug" if verbose else "info")
        if explain is not None:
            return _explained(request, explain, colour)
        if dry_run:
            return _planned(request, console)
        return _prepared(request, console, str(loaded.path) if loaded.path else None)

    run_command("prepare-data", OutputOptions(json, verbose, debug), body)


def _prepared(request: PrepareRequest, console: Console, recipe: str | None) -> Outcome:
    from tuner.data.prepare import prepare

    info = prepare(request, console.say)
    warnings = say_report(info, request, console)
    return Outcome(
        str(info.path),
        artifacts={"key": info.key, "cached": info.cached},
        metrics={**info.report, "max_length": request.max_length, "seconds": round(info.seconds, 3)},
        warnings=warnings,
        next=f"tuner train {recipe}" if recipe else None,
    )


def say_report(info: PreparedInfo, request: PrepareRequest, console: Console) -> list[str]:
    """Say what was prepared, as a table; return the warnings that it gives reason for."""
    report = info.report
    if info.cached:
        console.say("prepared", f"already prepared ({info.seconds:.1f} s)")
    if request.method.kind == "sft":
        masks = report["masks"]
        console.say("masks", f"proven on {masks['proven']:,} of {masks['rows']:,} rows")
    for split in ("train", "eval"):
        if report[split] is not None:
            console.say(split, _split_line(report[split]))
    train = report["train"]
    how = f"{train['fill']:.1%} full" if request.data.packing else "one document each"
    console.say("packing", f"{train['packed_rows']:,} rows of {request.max_length:,}, {how}")
    if not info.cached:
        console.say("done", f"{info.seconds:.1f} s")
    warnings = []
    for split in ("train", "eval"):
        skipped = (report[split] or {}).get("skipped", {})
        if skipped:
            count = sum(skipped.values())
            warnings.append(f"data.{split}: {count:,} bad rows skipped, see {info.path / 'rejects.jsonl'}")
    if report["overlap"]:
        warnings.append(f"data.eval: {report['overlap']:,} of its documents are in data.train too")
    return warnings


def _split_line(counts: dict[str, Any]) -> str:
    share = counts["packed_trained"] / max(counts["packed_tokens"], 1)
    parts = [
        f"{counts['packed_documents']:,} documents",
        f"{counts['packed_tokens']:,} tokens",
        f"{counts['packed_trained']:,} trained ({share:.0%})",
        f"longest {counts['longest']:,}",
    ]
    for word in ("truncated", "split", "duplicates"):
        if counts[word]:
            parts.append(f"{counts[word]:,} {word}")
    for reasons in (counts["dropped"], counts["dropped_rows"]):
        parts += [f"{count:,} dropped: {reason}" for reason, count in reasons.items()]
    return "  ".join(parts)


def _planned(request: PrepareRequest, console: Console) -> Outcome:
    from tuner.data.prepare import find_prepared, prepared_path
    from tuner.data.sources import expand

    files = expand(request.data.train)
    size = sum(file.path.stat().st_size for file in files)
    there = find_prepared(request) is not None
    console.say("read", f"{len(files):,} files, {size:,} bytes")
    console.say("plan", f"rows of {request.max_length:,} tokens, longer documents: {request.too_long}")
    console.say("prepared", "already prepared" if there else "not yet prepared")
    return Outcome(
        str(prepared_path(request)),
        artifacts={"cached": there},
        metrics={"files": len(files), "bytes": size, "max_length": request.max_length},
        is_text=True,
    )


def _explained(request: PrepareRequest, count: int, colour: bool) -> Outcome:
    from dataclasses import asdict

    from tuner.data.explain import explain

    rows = list(explain(request, count))
    text = "\n\n".join(_marked(request, row, colour) for row in rows)
    return Outcome(text, artifacts={"rows": [[asdict(token) for token in row] for row in rows]}, is_text=True)


def _marked(request: PrepareRequest, row: list[TokenView], colour: bool) -> str:
    """The row's text with its trained parts in brackets, in reverse green on a terminal."""
    from itertools import groupby

    from tuner.runtime.console import escape

    parts = []
    for trained, tokens in groupby(row, key=lambda token: token.trained):
        text = request.tokenizer.decode([token.id for token in tokens])
        shown = "\n".join(escape(line) for line in text.split("\n"))
        opening, closing = ("\x1b[7;32m", "\x1b[0m") if colour else ("", "")
        parts.append(f"{opening}[{shown}]{closing}" if trained else shown)
    return "".join(parts)
