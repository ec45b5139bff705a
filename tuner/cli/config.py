"""`tuner config`: check, show or describe a recipe."""

from __future__ import annotations

import shutil
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
from tuner.errors import RecipeError

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe

MOST_COLUMNS = 100
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def check(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Say everything that is wrong with a recipe; print its path when nothing is."""

    def body() -> Outcome:
        loaded = load_for_command(recipe, overrides_of(ctx))
        result = str(loaded.path) if loaded.path else "ok"
        return Outcome(result, next=f"tuner prepare-data {result}" if loaded.path else None)

    run_command("config check", OutputOptions(json, verbose, debug), body)


@app.command()
def show(
    ctx: typer.Context,
    recipe: RecipeArgument = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    plot_schedule: Annotated[
        bool, typer.Option("--plot-schedule", help="Draw the learning rate over the run instead.")
    ] = False,
    json: JsonOption = False,
    verbose: VerboseOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the whole recipe, defaults included."""

    def body() -> Outcome:
        from tuner.config.dump import recipe_dict, recipe_yaml
        from tuner.config.origin import with_origins

        loaded = load_for_command(recipe, overrides_of(ctx))
        if plot_schedule:
            if origin:
                raise RecipeError("--origin and --plot-schedule exclude each other", hint="leave one of them out")
            return _schedule(loaded.recipe)
        text = with_origins(loaded) if origin else recipe_yaml(loaded.recipe)
        return Outcome(
            text, artifacts={"recipe": recipe_dict(loaded.recipe), "origins": dict(loaded.origins)}, is_text=True
        )

    run_command("config show", OutputOptions(json, verbose, debug), body)


def _schedule(recipe: Recipe) -> Outcome:
    from tuner.cli.schedule_view import course, drawing, figures

    found, warnings = course(recipe)
    width = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    return Outcome(
        drawing(recipe, found, width), artifacts={"schedule": figures(recipe, found)}, warnings=warnings, is_text=True
    )


@app.command()
def schema(json: JsonOption = False, verbose: VerboseOption = False, debug: DebugOption = False) -> None:
    """Print the recipe's JSON schema, for editors."""

    def body() -> Outcome:
        import json as encoder

        from tuner.config.schema import recipe_schema

        return Outcome(encoder.dumps(recipe_schema(), indent=2), is_text=True)

    run_command("config schema", OutputOptions(json, verbose, debug), body)
