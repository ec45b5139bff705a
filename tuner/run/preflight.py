"""Before a launch: the run directory and the prepared data, then the recipe resolved for this machine and announced."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.checkpoint.load import CheckpointInfo, open_checkpoint
from tuner.checkpoint.manifest import SEAL
from tuner.config.dump import recipe_dict
from tuner.config.load import LoadedRecipe
from tuner.config.methods import DistillMethod
from tuner.config.optimizers import CustomOptimizer, keeps_states_on_host
from tuner.config.recipe import Recipe
from tuner.data.building.prepare import check_to_use, find_prepared, prepare_to_use, prepared_path
from tuner.data.building.spec import PrepareSpec, prepare_spec
from tuner.data.prepared import WAY_TO_NAME, PreparedData, open_prepared
from tuner.errors import DataError, RecipeError, counted
from tuner.model.build import fetch_weights
from tuner.model.vetting import ignored_code, untrained_indexer, weighs_routers
from tuner.run.changes import Reset, changes, freed_keys, moments_of, resets_for, starts_of
from tuner.run.options import HandedOver, LaunchOptions, RunResult
from tuner.run.previous import find_checkpoint, finished_result, require_recipe_of, warn_of_changes
from tuner.run.settle import Place, on_cuda, run_before, settle
from tuner.rundir.directory import RunDir
from tuner.runtime.console import Console
from tuner.runtime.device import TO_COMPILE, compiler_problem, triton_problem
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective
from tuner.setup.build import mesh_of, trainable_of, trained_count
from tuner.setup.resolve import Resolved, model_spec, resolve
from tuner.setup.settled import Settled, in_groups, rows_at_once
from tuner.setup.timetable import Rates, Starts, Timetable, few_steps, rates, timetable
from tuner.train.methods.method import check_method
from tuner.train.schedule import check_schedule

if TYPE_CHECKING:
    from tuner.rundir.windows import WindowPosition


@dataclass(frozen=True)
class Preflight:
    """What is known before a launch: the run's directory and past, and its data."""

    run: RunDir
    record: dict[str, Any] | None
    found: CheckpointInfo | None
    resets: tuple[Reset, ...]
    """All of the run; those at the step of `found` are this launch's to do."""
    spec: PrepareSpec
    data: PreparedData
    data_dir: Path
    windows: "WindowPosition | None" = None
    """Where the run is among the windows of its data, where it has windows: the data is that of the one at hand."""

    @property
    def starts(self) -> Starts:
        """Where each part of the run began last."""
        starts = starts_of(self.resets)
        if self.windows is None:
            return starts
        return replace(starts, data=self.windows.at_hand.first_step, window=self.windows.number)


def preflight(
    loaded: LoadedRecipe, options: LaunchOptions, console: Console, hashes: bool = True
) -> Preflight | RunResult:
    """Look at the run directory, fetch the weights and prepare the data: what needs no device and no other process.

    Without `hashes` the checkpoint's tensors are left to another rank to check. The result of a run that is finished
    already. Raises TunerError children; only prepared data is written.
    """
    if options.handed_over is not None:
        return _handed_over(loaded, options, options.handed_over)
    recipe = loaded.recipe
    run = RunDir(Path(recipe.output_dir))
    record = run.read_record()
    if options.reset and options.resume == "never":
        raise RecipeError("--reset needs a run to resume", hint="add --resume auto, must or a PATH")
    found = find_checkpoint(run, record, loaded, options, console, hashes)
    resets = resets_for(record, found, options.reset)
    if record is not None and not options.reset:
        result = finished_result(run, record, found, loaded, options, console)
        if result is not None:
            return result
    _check_user_code(recipe)
    if not options.dry_run:
        with console.doing(f"fetching the weights of {recipe.model.name_or_path}"):
            fetch_weights(model_spec(recipe, range(0)))
    spec = _spec(loaded)
    if recipe.model.init_from and found is None:
        with console.doing("looking at the weights of model.init_from"):
            _check_initial(loaded, spec)
    if isinstance(recipe.method, DistillMethod):
        from tuner.setup.teacher import check_teacher, teacher_model

        with console.doing(f"looking at the teacher, {recipe.method.teacher}"):
            check_teacher(recipe.method, spec.tokenizer, spec.cache_dir)
            if not options.dry_run and recipe.method.top_k is None:
                fetch_weights(teacher_model(recipe.method))
    if not recipe.data.windows.is_on:
        directory = _data_dir(spec, options, console)
        return Preflight(run, record, found, resets, spec, open_prepared(directory), directory)
    from tuner.run.windows.preparation import prepared_window
    from tuner.run.windows.start import begin_windows

    windows = begin_windows(spec, run, record, found, options, console)
    if isinstance(windows, RunResult):
        return windows
    directory = prepared_window(spec, windows.at_hand)
    return Preflight(run, record, found, resets, spec, open_prepared(directory), directory, windows)


def agreed(ready: Preflight, options: LaunchOptions, ranks: Collective) -> Preflight:
    """What rank 0 found of the checkpoint, whose tensors it hashed, on every rank. Collective.

    Each rank looked for itself. Raises DataError on all where one reads another manifest at the same path.
    """
    mine = ready.found
    chosen = ranks.on_all_ranks(lambda: None if mine is None else (str(mine.path), mine.manifest[SEAL]))
    found: list[CheckpointInfo | None] = [mine]

    def adopt() -> None:
        if chosen[0] == chosen[ranks.rank]:
            return
        found[0] = None if chosen[0] is None else open_checkpoint(Path(chosen[0][0]), verify=False)
        if found[0] is not None and chosen[0] is not None and found[0].manifest[SEAL] != chosen[0][1]:
            raise DataError(
                f"{found[0].path}: another manifest than rank 0 reads there",
                hint="all processes must see one file system",
            )

    ranks.on_all_ranks(adopt)
    if ready.windows is not None:
        ready = _same_window(ready, ranks)
    if found[0] is mine:
        return ready
    return replace(ready, found=found[0], resets=resets_for(ready.record, found[0], options.reset))


def _same_window(ready: Preflight, ranks: Collective) -> Preflight:
    """The window that rank 0 came upon, on every rank: a late one may have come in between. Collective."""
    from tuner.run.windows.preparation import prepared_window

    windows = ranks.on_rank0(lambda: ready.windows)
    if windows is None or windows == ready.windows:
        return ready
    directory = prepared_window(ready.spec, windows.at_hand)
    return replace(ready, windows=windows, data_dir=directory, data=open_prepared(directory))


def _handed_over(loaded: LoadedRecipe, options: LaunchOptions, given: HandedOver) -> Preflight:
    """What the process that started this rank has looked at and prepared a moment ago."""
    run = RunDir(Path(loaded.recipe.output_dir))
    record = run.read_record()
    found = None if given.checkpoint is None else open_checkpoint(given.checkpoint, verify=False)
    resets, spec = resets_for(record, found, options.reset), _spec(loaded)
    ready = Preflight(run, record, found, resets, spec, open_prepared(given.prepared), given.prepared)
    if given.windows is None:
        return ready
    from tuner.rundir.windows import WindowPosition

    return replace(ready, windows=WindowPosition.of(given.windows))


def _check_user_code(recipe: Recipe) -> None:
    """Try what the recipe names of the user's own, and trackers' libraries, before a model is loaded.

    Each is imported only where it is named. Raises PluginError, MachineError.
    """
    check_method(recipe.method)
    check_schedule(recipe.schedule)
    if isinstance(recipe.optimizer, CustomOptimizer):
        from tuner.run.trial import try_optimizer

        try_optimizer(recipe.optimizer)
    if recipe.eval.tasks:
        from tuner.evals.load import check_tasks

        check_tasks(recipe.eval.tasks)
    if recipe.hooks:
        from tuner.run.tasks.hooks import check_hooks

        check_hooks(recipe.hooks)
    if recipe.logging.trackers:
        from tuner.run.tasks.trackers.choose import check_trackers

        check_trackers(recipe.logging.trackers)


def _check_initial(loaded: LoadedRecipe, spec: PrepareSpec) -> None:
    """Match the sources of `model.init_from` with the model.

    Raises RecipeError with every problem, DataError for a damaged file.
    """
    from tuner.setup.findings import Findings
    from tuner.setup.initial import check_initial

    found = Findings(loaded)
    check_initial(loaded.recipe, trainable_of(loaded.recipe, spec.tokenizer.new_ids), found)
    found.raise_any()


def _spec(loaded: LoadedRecipe) -> PrepareSpec:
    recipe = loaded.recipe
    return prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)


def _data_dir(spec: PrepareSpec, options: LaunchOptions, console: Console) -> Path:
    if options.prepared is not None:
        data = open_prepared(options.prepared, verify=True)
        wanted = prepared_path(spec).name
        if data.key != wanted:
            raise DataError(
                f"{options.prepared}: was not prepared by this recipe (key {data.key}, the recipe's is {wanted})",
                hint=WAY_TO_NAME,
            )
        check_to_use(spec, options.prepared, console)
        return options.prepared
    if options.no_prepare and find_prepared(spec) is None:
        raise DataError("the data is not prepared", hint="run tuner prepare-data first, or leave out --no-prepare")
    return prepare_to_use(spec, console)


def settled_for(
    ready: Preflight, loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console, starts: bool
) -> Settled:
    """What is settled once for all ranks of a launch: handed over, as the run had it, or predicted.

    Where torchrun or srun started them, rank 0 settles it, and the others wait for it; or this process ``starts`` them.
    """
    if options.handed_over is not None:
        return options.handed_over.settled
    before = run_before(ready.run.recipe(ready.record), ready.record, rank_info.world_size)
    place = Place.of(ready.data_dir, ready.spec.cache_dir, options.dry_run, starts)
    return settle(loaded, before, rank_info, place, console)


def plan_launch(
    ready: Preflight, loaded: LoadedRecipe, options: LaunchOptions, rank_info: RankInfo, console: Console
) -> tuple[Resolved, int]:
    """The resolved recipe of a launch and the steps of the whole run, which are announced.

    Raises RecipeError where this machine resolves the recipe to another run than the one that is resumed.
    """
    run, record, found = ready.run, ready.record, ready.found
    if not options.dry_run and rank_info.local_rank == 0 and on_cuda(loaded.recipe.train.device):
        from tuner.model.read_ahead import begin_reading  # while memory is predicted; a CPU needs its cores

        begin_reading(model_spec(loaded.recipe, range(0)))
    settled = settled_for(ready, loaded, options, rank_info, console, starts=False)
    recipe = settled.of(loaded.recipe)
    resolved = resolve(recipe, ready.spec.max_length, rank_info, ready.spec.tokenizer.new_ids)
    reasons = {**resolved.reasons, **settled.reasons}
    resolved = replace(resolved, reasons=reasons, settled=dict(settled.values))
    before = run.recipe(record)
    if record is not None and before is not None:
        _require_same_choices(run.path, before.recipe, loaded.recipe, resolved.recipe, options, console)
    elif found is not None:
        require_recipe_of(found, recipe_dict(resolved.recipe), options.reset)
    if ready.windows is not None:
        from tuner.setup.window_course import check_reference

        check_reference(resolved.recipe)
    table = timetable(resolved.recipe, ready.data, ready.starts)
    total_steps = table.plan.total_steps
    if record is None and found is not None and found.step >= total_steps:
        raise RecipeError(f"{found.path}: no steps are left to train", hint="give an earlier checkpoint of its run")
    rate = rates(resolved.recipe, ready.data, table, ready.starts)
    _announce(console, resolved, table, rate, rank_info)
    if keeps_states_on_host(resolved.recipe.optimizer):
        from tuner.setup.host_states import announce_host_states

        announce_host_states(console, resolved, rank_info)
    announce_packing(console, resolved, ready.data)
    if found is None and (few := few_steps(loaded.recipe, table.plan)) is not None:
        console.warn(few)
    for flaw in rate.flaws:
        console.warn(flaw)
    return resolved, total_steps


def _require_same_choices(
    run_dir: Path, before: Recipe, written: Recipe, resolved: Recipe, options: LaunchOptions, console: Console
) -> None:
    """A launch on another machine must not settle an `auto` into another run; warn where only bits differ.

    Takes the recipes of the launches before, as it is written now, and as it is resolved now.
    """
    resolved = resolved.model_copy(update={"parallel": written.parallel})  # of which a run keeps what was written, too
    freed = freed_keys(options.reset, moments_of(before.optimizer), moments_of(resolved.optimizer))
    changed, known = (changes(recipe_dict(before), recipe_dict(recipe), freed) for recipe in (resolved, written))
    if changed.refuse:
        raise RecipeError(
            f"{run_dir}: this machine resolves the recipe differently ({changed.shown()})",
            hint=f"keep the run's choices: tuner resume {run_dir}",
        )
    warn_of_changes([line for line in changed.warn if line not in known.warn], console)


def _announce(console: Console, resolved: Resolved, table: Timetable, rate: Rates, rank_info: RankInfo) -> None:
    recipe, plan, facts = resolved.recipe, table.plan, resolved.facts
    trained = _trained(resolved)
    processes = in_groups(recipe, rank_info.world_size)
    codes = "" if recipe.model.quantize == "none" else f", linear layers in {recipe.model.quantize}"
    console.say(
        "model",
        f"{Path(recipe.model.name_or_path).name}, {_millions(resolved.n_parameters)} parameters, {trained} · "
        f"{facts.kind}, {recipe.train.precision} compute, {recipe.model.dtype} weights{codes}, "
        + counted(facts.threads, "thread"),
    )
    micro, row = rows_at_once(recipe), "packed row" if recipe.data.packs_rows else "row"
    accumulated = -(-plan.global_batch_size // (micro * mesh_of(recipe, rank_info).data_size))
    for label in ("part", "attention", "fp8", "dropout"):
        if label in resolved.reasons:
            console.say(label, resolved.reasons[label])
    console.say(
        "plan",
        f"{_length(recipe, table, row)} · micro-batch {micro} x {accumulated} accumulated x {processes} · "
        f"lr {rate}"
        + (f" (auto: {resolved.reasons['optimizer.lr']})" if "optimizer.lr" in resolved.reasons else ""),
    )
    if recipe.train.offload_activations is True:
        from tuner.setup.offloaded import offload_line  # few trainings do

        console.say("offload", offload_line(resolved))
    if resolved.settled:
        console.say("settled", "\n".join(f"{k} {v}: {resolved.reasons[k]}" for k, v in resolved.settled.items()))
    for sentence in (ignored_code(resolved.config), _unasked_loss(resolved), untrained_indexer(resolved.config)):
        if sentence is not None:
            console.warn(f"{recipe.model.name_or_path}: {sentence}")
    if (slower := _slower(resolved)) is not None:
        console.warn(slower)
    console.say("run", recipe.output_dir)


def _length(recipe: Recipe, table: Timetable, row: str) -> str:
    """How the number of steps follows, in words; ``row`` is what a row is called."""
    if not recipe.data.windows.is_on:
        return table.plan.derivation(recipe.train.duration, row)
    from tuner.setup.window_course import window_words

    return window_words(recipe, table.plan, table.data_start)


def announce_packing(console: Console, resolved: Resolved, data: PreparedData, planned: bool = True) -> None:
    """Say how documents go through the model where they do not lie end to end, and what that costs.

    Where that was not ``planned`` but found when the model was proven, it is a warning.
    """
    if resolved.route == "flat":
        return
    from tuner.setup.apart import packing_line

    line = packing_line(resolved, data.train)
    if planned:
        console.say("packing", line)
    else:
        console.warn(f"data.packing: what was planned for documents end to end is computed apart: {line}")


def _unasked_loss(resolved: Resolved) -> str | None:
    """A sentence on a term of the loss that the config weighs and does not ask for; None where there is no such one."""
    if resolved.recipe.model.router_aux_loss_coef is not None or not weighs_routers(resolved.config):
        return None
    from tuner.model.router_loss import unasked_term

    return unasked_term(resolved.config)


def _slower(resolved: Resolved) -> str | None:
    """What a training on CUDA does without because this machine cannot compile it, and how it could; None: nothing."""
    if resolved.facts.kind != "cuda":
        return None
    lacking = {"train.compile": compiler_problem("cuda"), "model.kernels": triton_problem()}
    found = [key for key, problem in lacking.items() if problem and problem in resolved.reasons.get(key, "")]
    if not found:
        return None
    what = {"train.compile": "the decoder layers are not compiled", "model.kernels": "liger's kernels are not used"}
    problem = next(filter(None, (lacking[key] for key in found)))
    return f"{problem}: {' and '.join(what[key] for key in found)}; slower, with more memory (to fix it: {TO_COMPILE})"


def _trained(resolved: Resolved) -> str:
    """What of the model is trained, and how much that is."""
    recipe, count = resolved.recipe, trained_count(resolved)
    if recipe.adapter.kind == "none" and not recipe.model.freeze:
        return "all trained"
    share = f"{_millions(count)} trained ({count / resolved.n_parameters:.2%})"
    if recipe.adapter.kind == "none":
        return f"{share}, all but {', '.join(recipe.model.freeze)}"
    return f"{share}: {recipe.adapter.kind}, r {recipe.adapter.r}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 10**6 else f"{count:,}"
