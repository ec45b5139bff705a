"""What an argument that names a run means: a path, the name of a run under ./runs, or a recipe, which has one run."""

import os
from pathlib import Path
from typing import Literal

from tuner.cli.command import console_of, input_path
from tuner.errors import RecipeError, TunerError
from tuner.rundir.in_store import Extent, bring
from tuner.rundir.model_path import HubModel, Which, is_run_path
from tuner.rundir.run_json import is_run
from tuner.stages import is_url, shown, url_of

RUNS = "runs"
"""Where recipes put their runs, unless they say otherwise."""
RECIPES = (".yaml", ".yml")
SHOWN_NAMES = 8
HUB_SECONDS = 3.0
"""How long the hub may take to say whether it has a model."""

Engine = Literal["transformers", "llama.cpp"]


def require_engine(name: str, engine: str) -> bool:
    """Whether llama.cpp is asked. Raises RecipeError where the engine is not one for what is named."""
    is_gguf = name.endswith(".gguf")
    if is_gguf != (engine == "llama.cpp"):
        wanted = ("a GGUF file", "llama.cpp") if is_gguf else ("no GGUF file", "transformers")
        raise RecipeError(f"{name}: is {wanted[0]}, which {engine} does not load: --engine {wanted[1]} does")
    return is_gguf


def stage_path(argument: str | Path, extent: Extent = "model", which: Which = "newest") -> Path:
    """Return the absolute path of an argument as `input_path` does; what is in a store is fetched as far as is asked.

    Raises RecipeError and MachineError.
    """
    path = input_path(argument, in_store=True)
    _bring(path, extent, which)
    return path


def _bring(path: Path, extent: Extent, which: Which = "newest") -> None:
    if url_of(path) is None:
        return
    console = console_of("info")
    with console.doing(f"fetching {shown(path)}"):
        bring(path, console.say, extent, which)


def run_path(
    argument: str | Path, recipes: bool = True, others: bool = False, extent: Extent = "look", which: Which = "newest",
) -> Path:
    """Return the directory that an argument names, as an absolute path; `-` reads the argument from stdin.

    What is in a store is fetched as far as is asked. A path that exists wins; with `recipes` a recipe stands for the
    directory of its run, which is said. A directory that is no run, such as an export next to the recipe, hides no run
    of its name, but for commands that take `others`.
    Raises RecipeError for what is none of these, with the runs that there are.
    """
    path = stage_path(argument, extent, which)
    if recipes and path.is_file() and path.suffix in RECIPES:
        return _run_of(path, extent, which)
    if path.exists() and (others or not recipes or is_run_path(path)):
        return path
    named, recipe = _named(str(argument)), path.with_name(f"{path.name}.yaml")
    if named is not None and (is_run_path(named) or not path.exists()):
        return named
    if recipes and recipe.is_file() and (not path.exists() or _has_begun(recipe)):
        return _run_of(recipe, extent, which)
    if path.exists():
        return path
    if url_of(path) is not None:
        raise RecipeError(f"{shown(path)}: the store has no run or model there", hint="its URL is what training said")
    raise RecipeError(f"{path}: no such directory, and no run of that name in ./{RUNS}", hint=known_runs())


def model_name(argument: str) -> str:
    """The directory or the hub name that `run_or_hub` finds; raises what it raises."""
    found = run_or_hub(argument)
    return found.name if isinstance(found, HubModel) else str(found)


def run_or_hub(argument: str) -> Path | HubModel:
    """Return what `run_path` returns of any directory; of what is none, the hub model of that name.

    Raises RecipeError, with the runs that there are, for a name that the hub has none of either.
    """
    if argument.endswith(".gguf") and not is_url(argument) and not input_path(argument).exists():
        raise RecipeError(f"{argument}: no such file")
    try:
        return run_path(argument, others=True, extent="model")
    except RecipeError as error:
        if argument == "-" or is_url(argument) or argument.startswith(("/", ".", "~")) or Path(argument).is_file():
            raise
        if (why := _not_on_hub(argument)) is not None:
            raise RecipeError(f"{error.message}, no model in the hub's cache, and {why}", hint=error.hint) from None
    return HubModel(argument)


def _not_on_hub(name: str) -> str | None:
    """Why a hub name is not available: neither cached nor there; None where it is. One request, without retries."""
    from huggingface_hub import HfApi, errors, try_to_load_from_cache

    try:
        cached = (try_to_load_from_cache(name, file) for file in ("config.json", "adapter_config.json"))
        if not any(isinstance(path, str) for path in cached):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        return "the hub has none of that name"
    except errors.HfHubHTTPError:
        return None  # it answered: loading says what is wrong
    except Exception:  # noqa: BLE001 (of the HTTP client, which is another library in other versions of the hub's)
        return "the hub cannot be reached"
    return None


def known_runs() -> str:
    """A hint with the names of the runs that are here."""
    place = Path.cwd() / RUNS
    found = sorted(path.name for path in place.iterdir() if is_run(path)) if place.is_dir() else []
    if not found:
        return f"there is no run in ./{RUNS}; give the directory of a run, such as tuner train printed"
    more = f" and {len(found) - SHOWN_NAMES} more" if len(found) > SHOWN_NAMES else ""
    return f"there are: {', '.join(found[:SHOWN_NAMES])}{more} (tuner runs list)"


def _named(name: str) -> Path | None:
    """The directory ./runs/NAME, where there is one."""
    path = Path.cwd() / RUNS / name
    return path if name not in ("", "-") and not os.path.isabs(name) and path.is_dir() else None


def _has_begun(recipe: Path) -> bool:
    """Whether a file is a recipe whose run is there."""
    try:
        return is_run(_directory_of(recipe))
    except TunerError:
        return False


def _directory_of(recipe: Path) -> Path:
    from tuner.config.load import load_recipe

    return Path(load_recipe(recipe).recipe.output_dir)


def _run_of(recipe: Path, extent: Extent, which: Which) -> Path:
    """The directory of a recipe's run. Raises RecipeError where the recipe is wrong, or its run never began."""
    directory = _directory_of(recipe)
    _bring(directory, extent, which)
    if not is_run(directory):
        raise RecipeError(
            f"{recipe} is a recipe, and its run has not begun ({directory})", hint=f"begin it: tuner train {recipe}"
        )
    console_of("info").say("run", f"{directory}, which {recipe.name} trains")
    return directory
