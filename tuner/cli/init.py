"""`tuner init`: look at the rows, write a commented recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.command import Outcome, command, say
from tuner.runtime.activity import LABEL_WIDTH


@command("init")
def init(
    model: Annotated[str, typer.Option("--model", "-m", help="Hub name or local directory of the base model.")],
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", help="Rows: a file (JSON, CSV, parquet, text, ...), a directory or owner/name:split."
        ),
    ],
) -> Outcome:
    """Look at the first rows and print a commented recipe."""
    from tuner.config.load import load_recipe
    from tuner.config.starter import bad_rows, counted, not_used, starter
    from tuner.data.look import look

    given = load_recipe({"model": {"name_or_path": model}, "data": {"train": data}}).recipe
    seen = look(given.model.name_or_path, given.data.train[0])
    text = starter(model, data, seen)
    tokens = "tokens" if seen.by_tokenizer else "tokens (estimated)"
    say(
        f"read      {data}: {counted(seen)}, {seen.form}{not_used(seen)}; longest {seen.longest:,} "
        f"{tokens} -> data.max_length {seen.max_length}, {seen.steps:,} step{'' if seen.steps == 1 else 's'}",
        LABEL_WIDTH,
    )
    warnings = [f"{bad_rows(seen)}; the first: {seen.first_bad}"] if seen.bad else []
    metrics = {
        "rows": seen.rows, "longest_tokens": seen.longest, "max_length": seen.max_length,
        "packed_rows": seen.packed_rows, "steps": seen.steps, "bad_rows": seen.bad,
    }  # fmt: skip
    return Outcome(text, metrics=metrics, warnings=warnings, is_text=True)
