"""What a launch is going to do: the recipe resolved for this machine, checked against its run, and said."""

from pathlib import Path

from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe
from tuner.config.recipe import Recipe
from tuner.errors import RecipeError
from tuner.model.vetting import ignored_code, ignored_losses
from tuner.run.build import mesh_of
from tuner.run.changes import changes
from tuner.run.options import LaunchOptions
from tuner.run.preflight import Preflight
from tuner.run.previous import require_recipe_of, warn_of_changes
from tuner.run.resets import freed_keys, starts_of
from tuner.run.resolve import Resolved, resolve
from tuner.run.timetable import Timetable, timetable
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo


def plan_launch(
    ready: Preflight, loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console
) -> tuple[Resolved, int]:
    """The resolved recipe of a launch and the steps of the whole run, which are announced.

    Raises RecipeError where this machine resolves the recipe to another run than the one that is resumed.
    """
    run, record, found = ready.run, ready.record, ready.found
    resolved = resolve(loaded.recipe, ready.spec.max_length, rank_info, ready.spec.tokenizer.new_ids)
    before = run.recipe(record)
    if record is not None and before is not None:
        _require_same_choices(run.path, before.recipe, loaded.recipe, resolved.recipe, options, console)
    elif found is not None:
        require_recipe_of(found, recipe_dict(resolved.recipe), options.reset)
    table = timetable(resolved.recipe, ready.data, starts_of(ready.resets))
    total_steps = table.plan.total_steps
    if record is None and found is not None and found.step >= total_steps:
        raise RecipeError(f"{found.path}: no steps are left to train", hint="give an earlier checkpoint of its run")
    _announce(console, resolved, table, rank_info)
    return resolved, total_steps


def _require_same_choices(
    run_dir: Path, before: Recipe, written: Recipe, resolved: Recipe, options: LaunchOptions, console: Console
) -> None:
    """A launch on another machine must not settle an `auto` into another run; warn where only bits differ.

    Takes the recipes of the launches before, as it is written now, and as it is resolved now.
    """
    resolved = resolved.model_copy(update={"parallel": written.parallel})  # of which a run keeps what was written, too
    freed = freed_keys(options.reset, before.optimizer.kind, resolved.optimizer.kind)
    changed, known = (changes(recipe_dict(before), recipe_dict(recipe), freed) for recipe in (resolved, written))
    if changed.refuse:
        raise RecipeError(
            f"{run_dir}: this machine resolves the recipe differently ({changed.shown()})",
            hint=f"keep the run's choices: tuner resume {run_dir}",
        )
    warn_of_changes([line for line in changed.warn if line not in known.warn], console)


def _announce(console: Console, resolved: Resolved, table: Timetable, rank_info: RankInfo) -> None:
    recipe, plan, facts = resolved.recipe, table.plan, resolved.facts
    full = f"all but {', '.join(recipe.model.freeze)} trained" if recipe.model.freeze else "all trained"
    trained = full if recipe.adapter.kind == "none" else f"{recipe.adapter.kind} adapter trained"
    processes = f"{rank_info.world_size} process" + ("es" if rank_info.world_size > 1 else "")
    console.say(
        "model",
        f"{Path(recipe.model.name_or_path).name}, {resolved.n_parameters / 1e6:,.1f} M parameters, {trained} · "
        f"{facts.kind}, {recipe.train.precision} compute, {recipe.model.dtype} weights, "
        f"{facts.threads} thread{'s' if facts.threads != 1 else ''}",
    )
    micro = recipe.train.micro_batch_size
    accumulated = -(-plan.global_batch_size // (micro * mesh_of(recipe, rank_info).data_size))
    console.say(
        "plan",
        f"{plan.derivation(recipe.train.duration)} · micro-batch {micro} x {accumulated} x {processes} · "
        f"lr {table.peak_lr:g}"
        + (f" (auto: {resolved.reasons['optimizer.lr']})" if "optimizer.lr" in resolved.reasons else ""),
    )
    for ignored in (ignored_code(resolved.config), ignored_losses(resolved.config)):
        if ignored is not None:
            console.warn(f"{recipe.model.name_or_path}: {ignored}")
    console.say("run", recipe.output_dir)
