"""`tuner init`: look at the rows, write a commented recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.command import Outcome, command


@command("init")
def init(
    model: Annotated[str, typer.Option("--model", "-m", help="Hub name or local directory of the base model.")],
    data: Annotated[Path, typer.Option("--data", "-d", help="File of rows: JSON lines or plain text.")],
) -> Outcome:
    """Look at the first rows and print a commented recipe."""
    from tuner.config.load import load_recipe
    from tuner.config.starter import look, starter

    seen = look(data)
    text = starter(model, str(data), seen)
    load_recipe({"model": {"name_or_path": model}, "data": {"train": str(data)}})
    print(
        f"read      {data}: {seen.rows:,} rows, {seen.form}; longest {seen.longest:,} characters"
        f" -> data.max_length {seen.max_length}",
        file=sys.stderr,
    )
    return Outcome(text, metrics={"rows": seen.rows, "longest_characters": seen.longest}, is_text=True)
