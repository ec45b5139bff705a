"""`tuner config`: check, show or describe a recipe."""

import json
import shutil
import sys

from tuner.cli.command import Flags, Outcome, command, fetch_inputs, load_for_command, read_for_command
from tuner.errors import RecipeError

MOST_COLUMNS = 100


@command("config check")
def check(flags: Flags, recipe: str | None = None) -> Outcome:
    """Say everything that is wrong with a recipe - keys, files, templates, code, layers; else print its path."""
    from tuner.setup.check import check_recipe, schedule_warnings

    read = read_for_command(recipe, flags)
    if read.loaded is not None and not read.problems:
        fetch_inputs(read.loaded)
    print(f"checked   {check_recipe(read)}", file=sys.stderr)
    whole = read.whole()
    path, warnings = whole.path, schedule_warnings(whole.recipe)
    result = str(path) if path else "ok"
    return Outcome(result, warnings=warnings, next=f"tuner prepare-data {result}" if path else None)


@command("config show")
def show(flags: Flags, recipe: str | None = None, origin: bool = False, plot_schedule: bool = False) -> Outcome:
    """Print the whole recipe, defaults included."""
    from tuner.config.load import recipe_dict, recipe_yaml

    loaded = load_for_command(recipe, flags)
    if plot_schedule:
        if origin:
            raise RecipeError("--origin and --plot-schedule exclude each other", hint="leave one of them out")
        from tuner.cli.work.schedule import drawing, figures, planned_schedule

        found, warnings = planned_schedule(loaded.recipe)
        text = drawing(loaded.recipe, found, min(MOST_COLUMNS, shutil.get_terminal_size().columns))
        artifacts = {"schedule": figures(loaded.recipe, found)}
        return Outcome(text, artifacts=artifacts, warnings=warnings, is_text=True)
    text = recipe_yaml(loaded.recipe, loaded.origins if origin else None)
    return Outcome(text, artifacts={"recipe": recipe_dict(loaded.recipe), "origins": loaded.origins}, is_text=True)


@command("config diff")
def diff(old: str, new: str) -> Outcome:
    """Print the keys in which two recipes differ, defaults included."""
    from tuner.config.load import flatten, recipe_dict

    one, other = (flatten(recipe_dict(load_for_command(each).recipe)) for each in (old, new))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    found = {key: [one.get(key), other.get(key)] for key in keys}
    lines = (f"{key}  {json.dumps(before)} -> {json.dumps(after)}" for key, (before, after) in found.items())
    return Outcome("\n".join(lines) or "no key differs", artifacts={"differences": found}, is_text=True)


@command("config schema")
def schema() -> Outcome:
    """Print the recipe's JSON schema, for editors."""
    from tuner.config.fields import recipe_schema

    return Outcome(json.dumps(recipe_schema(), indent=2), is_text=True)
