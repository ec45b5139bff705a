"""`tuner init`: look at the rows, write a commented recipe."""

from typing import Annotated

import typer

from tuner.cli.command import Outcome, command


@command("init")
def init(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Hub name or local directory of the base model.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", "-d", help="Rows: a file (JSON, CSV, parquet, text, ...), a directory or owner/name:split."
        ),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option("--example", help="Rows that ship, written here: orders, reasoning, preferences, tools or notes."),
    ] = None,
) -> Outcome:
    """Look at the first rows and print a commented recipe."""
    from tuner.cli.work.init import first_recipe

    return first_recipe(model, data, example)
