"""A trained model measured outside of any run, on a recipe's held-out rows or on tasks: what `tuner eval` does."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.checkpoint.load import load_into
from tuner.config.load import LoadedRecipe, Override, load_recipe
from tuner.config.methods import Head, Method, head_of
from tuner.config.recipe import ModelSection, NoAdapter, Recipe
from tuner.data.building.prepare import prepare_to_use
from tuner.data.building.spec import prepare_spec
from tuner.data.encoding.tokenizer_files import tokenizer_directory
from tuner.data.prepared import PreparedData, open_prepared
from tuner.errors import DataError, DivergedError, RecipeError, counted
from tuner.evals.load import check_tasks, load_tasks
from tuner.evals.scorer import Scorer
from tuner.evals.task import Respondent, ScoredTask, TaskScore
from tuner.model.root import CausalLM, trained_parameters
from tuner.run.columns import ColumnsInfo, cached_columns, with_row_columns
from tuner.run.state import GIVEN
from tuner.run.tasks.task_scores import write_scores
from tuner.rundir.checkpoints import require_same_base, require_same_quantizer
from tuner.rundir.layout import MODEL_PREFIX, RESOLVED_RECIPE
from tuner.rundir.model_path import HfDirectory, HubModel, RunCheckpoint, resolve_model_path
from tuner.runtime.console import Console
from tuner.runtime.deterministic import tf32_products
from tuner.runtime.dist import RankInfo
from tuner.runtime.files import read_json
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.build import held_out_rows
from tuner.setup.model import load_training_model
from tuner.setup.resolve import Resolved, check_fits, method_section, quantizer_facts, resolve
from tuner.setup.settled import AXES, rows_at_once
from tuner.setup.specs import joined
from tuner.train.evaluate import ByTerms, Evaluation, HeldOut, evaluate
from tuner.train.methods.method import build_method
from tuner.train.methods.preference import AnswersAlone
from tuner.train.step import StepConfig

Trained = RunCheckpoint | HfDirectory | HubModel
"""A model to evaluate."""


@dataclass(frozen=True)
class Score:
    """What was evaluated, and what came out."""

    path: Path
    step: int | None
    """The checkpoint's step; None for a Hugging Face directory and a hub name."""
    measure: str
    """What the loss is: `cross_entropy` of the trained tokens, the method's own by its kind, or `answers_alone`."""
    evaluation: Evaluation
    rows: int
    seconds: float


def find_trained(path: Path | HubModel, console: Console) -> Trained:
    """A run's last checkpoint, the checkpoint given, a Hugging Face directory, or a model of the hub.

    Raises RecipeError for a path that is none of them, and DataError for a checkpoint that is damaged or gone.
    """
    if isinstance(path, HubModel):
        return path
    found = resolve_model_path(path, console.warn)
    if isinstance(found, HfDirectory) and found.is_adapter:
        raise RecipeError(
            f"{path} holds an adapter without its model",
            hint="evaluate the run itself, or what tuner export-hf RUN --adapter merge writes",
        )
    return found


def score(trained: Trained, loaded: LoadedRecipe, rank_info: RankInfo, console: Console) -> Score:
    """Evaluate the model on the recipe's held-out rows, preparing them where that is not done. Collective.

    Model, adapter and tokenizer are the directory's own; rows, method, batch size and precision the recipe's, where
    `auto` is what the run had. A checkpoint of a method with a reference is measured against that of its run on the
    run's rows; an export, or other rows, by the log-probabilities of the answers alone: what the cache holds decides
    nothing. Raises RecipeError for a recipe without held-out rows, and for labelled answers without their reference,
    DataError where the run's own rows are not those that it had, or its reference is gone, DivergedError where the loss
    is not finite.
    """
    recipe = recipe_of(trained, loaded, rank_info.world_size)
    if recipe.data.eval is None:
        raise RecipeError("the recipe has no held-out rows", hint="name them: --data.eval FILE, or 2%")
    with console.doing("reading the data"):
        spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, loaded.recipe.seed)
        data = open_prepared(prepare_to_use(spec, console))
        _require_same_rows(trained, loaded.recipe, data)
        resolved = resolve(recipe, spec.max_length, rank_info, spec.tokenizer.new_ids)
    if (held := held_out_rows(recipe.data, data)) is None:
        raise DataError(f"{data.path}: holds no held-out rows")
    section, batch = method_section(resolved), recipe.train.global_batch_size
    measure, held, by_terms = _measured(trained, section, batch, held, data, spec.cache_dir, console)
    console.say("model", f"{trained.path} · {resolved.facts.kind}, {resolved.numerics.precision} compute")
    with joined(resolved, rank_info), tf32_products(recipe.train.tf32):
        check_fits(spec.tokenizer, resolved.config, data)
        with console.doing("loading model"):
            root, step_config = loaded_model(trained, resolved, rank_info)
        started = time.monotonic()
        micro_batch_size, max_rows = rows_at_once(recipe.train), recipe.eval.max_rows
        rows = len(held.rows) if max_rows is None else min(max_rows, len(held.rows))
        with console.doing(f"evaluating {counted(rows, 'row')}"):
            result = evaluate(root, step_config, held, micro_batch_size, max_rows, by_terms=by_terms)
        seconds = time.monotonic() - started
    if not math.isfinite(result.loss):
        raise DivergedError(f"{trained.path}: the loss is {result.loss}", hint="look at the run: tuner runs plot RUN")
    step = trained.checkpoint.step if isinstance(trained, RunCheckpoint) else None
    return Score(trained.path, step, measure, result, rows, seconds)


def loaded_model(trained: Trained, resolved: Resolved, rank_info: RankInfo) -> tuple[CausalLM, StepConfig]:
    """The model with its weights, and how it computes. Collective. Raises DataError for another base's checkpoint."""
    if isinstance(trained, RunCheckpoint):
        resolved = replace(resolved, given=trained.checkpoint.meta.get(GIVEN))
    (root, facts), step_config = load_training_model(resolved, rank_info)
    if isinstance(trained, RunCheckpoint):
        require_same_base(trained.checkpoint, facts.agreed_frozen_hash())
        require_same_quantizer(trained.checkpoint, quantizer_facts(resolved))
        tensors = {f"{MODEL_PREFIX}{name}": p.data for name, p in trained_parameters(root).items()}
        load_into(trained.checkpoint, tensors, prefix=MODEL_PREFIX)
    return root, step_config


def run_recipe(trained: Trained) -> Path | Mapping[str, Any]:
    """The resolved recipe of the run that the model belongs to: its file, or the checkpoint's where that is gone.

    Raises RecipeError where it has none.
    """
    if not isinstance(trained, RunCheckpoint):
        raise RecipeError(f"{trained.path}: no recipe names held-out rows", hint="give one: tuner eval MODEL RECIPE")
    path = trained.run_dir / RESOLVED_RECIPE
    recipe: Mapping[str, Any] = trained.checkpoint.meta["recipe"]
    return path if path.is_file() else recipe


def _require_same_rows(trained: Trained, recipe: Recipe, data: PreparedData) -> None:
    """Check that the rows that the run's own recipe names are those that it was trained with. Raises DataError."""
    if not isinstance(trained, RunCheckpoint) or recipe.data.portions:  # each portion has a key of its own
        return
    own, had = load_recipe(run_recipe(trained)).recipe, trained.checkpoint.manifest["meta"].get("data_key")
    here = {"cache_dir": own.data.cache_dir, "workers": own.data.workers}  # these may be the machine's
    asked = (recipe.data.model_copy(update=here), recipe.method.examples, recipe.seed)
    if asked == (own.data, own.method.examples, own.seed) and data.key != had:
        raise DataError(
            f"{trained.path}: the rows of {trained.run_dir / RESOLVED_RECIPE} are not those that the run had "
            f"({had} -> {data.key}): a file or a key under data changed, or the version of tuner that prepared them",
            hint="restore what changed; or name other rows to measure on in a recipe: tuner eval RUN RECIPE",
        )


def _measured(
    trained: Trained, section: Method, batch: int, held: HeldOut, data: PreparedData, cache_dir: Path, console: Console
) -> tuple[str, HeldOut, ByTerms | None]:
    """What is measured, the rows with the columns of a reference where the method has one, and how.

    ``batch`` are the rows of a training step.
    """
    method, kind = build_method(section), section.kind
    by_terms = ByTerms.of(method, batch)
    if method.reference != "columns":
        return "cross_entropy" if by_terms is None else kind, held, by_terms
    info = ColumnsInfo.of(trained.checkpoint if isinstance(trained, RunCheckpoint) else None, "reference")
    if info is not None and info.prepared_key == data.key:
        columns = cached_columns(cache_dir, info)
        return kind, replace(held, rows=with_row_columns(held.rows, columns["eval"])), by_terms
    if section.examples.kind != "preference":
        raise RecipeError(
            f"method.kind: {kind} measures against a reference, which {trained.path} has none of for these rows",
            hint="evaluate the run itself on its own rows: tuner eval RUN",
        )
    console.say(
        "measure",
        "pairs by the log-probabilities of their answers alone, the loss is the cross-entropy of chosen answers: "
        f"{kind} needs the run's reference, which checkpoints have for the run's own rows",
    )
    return "answers_alone", held, ByTerms.of(AnswersAlone(), batch)


def _require_head(trained: Trained, head: Head, recipe: Recipe) -> None:
    """Check that a reward model is asked for scores, and any other one for text. Raises RecipeError."""
    kind = recipe.method.kind
    if head == head_of(recipe.method):
        return
    if head == "score":
        said = f"{trained.path}: is a reward model, and method.kind: {kind} measures text"
        raise RecipeError(said, hint="give a recipe with method.kind: reward")
    said = f"{trained.path}: is no reward model, which method.kind: {kind} measures"
    raise RecipeError(said, hint="give a run of method.kind: reward, or its export")


def _head_in(trained: HfDirectory | HubModel) -> Head:
    """What its config says of a model. MachineError for a hub name that cannot be fetched; RecipeError without one."""
    config = tokenizer_directory(str(trained.path), None) / "config.json"  # of a hub name it is fetched along
    if not config.is_file():
        raise RecipeError(f"{trained.path} holds no whole model", hint="name one that has a config.json")
    named = read_json(config).get("architectures") or ()
    return "score" if any("ForSequenceClassification" in str(name) for name in named) else "tokens"


def recipe_of(trained: Trained, loaded: LoadedRecipe, processes: int) -> Recipe:
    """The recipe with the directory's own model in place of its own, on so many processes.

    Its mesh is that of the training. Where the processes do not divide into it, as one never does, they share nothing
    but the weights that FSDP2 gathers.
    """
    plain = loaded.recipe.train.model_copy(update={"compile": False})  # no layer is compiled for evaluation
    parallel = loaded.recipe.parallel
    if processes % (parallel.tensor * max(parallel.sequence, parallel.expert)):
        parallel = parallel.model_copy(update=dict.fromkeys(AXES, 1))
    recipe = loaded.recipe.model_copy(update={"train": plain, "parallel": parallel})
    if not isinstance(trained, RunCheckpoint):
        _require_head(trained, _head_in(trained), recipe)
        model = ModelSection(name_or_path=str(trained.path), kernels=recipe.model.kernels)
        tokenizer = recipe.tokenizer.model_copy(update={"add_tokens": ()})  # what was added is in its own by now
        method = recipe.method
        if "reference" in type(method).model_fields:
            method = method.model_copy(update={"reference": "columns"})  # an export has no adapter to switch off
        update = {"model": model, "adapter": NoAdapter(), "tokenizer": tokenizer, "method": method}
        return recipe.model_copy(update=update)
    own = load_recipe(run_recipe(trained)).recipe
    _require_head(trained, head_of(own.method), recipe)
    had = {key: getattr(own.train, key) for key in ("precision", "micro_batch_size")}
    update = {key: value for key, value in had.items() if getattr(recipe.train, key) == "auto"}
    # The seed too: frozen weights may have been drawn from it.
    sections = {"model": own.model, "adapter": own.adapter, "tokenizer": own.tokenizer, "seed": own.seed}
    return recipe.model_copy(update={**sections, "train": recipe.train.model_copy(update=update)})


OWN = "recipe"
"""What stands for the tasks of the recipe, in place of a task's name."""


@dataclass(frozen=True)
class TasksScore:
    """What was scored, and what came out."""

    path: Path
    step: int | None
    """The checkpoint's step; None for a Hugging Face directory and a hub name."""
    scores: Sequence[TaskScore]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Every figure as TASK/FIGURE."""
        return {name: value for score in self.scores for name, value in score.line().items()}


def with_tasks(overrides: Sequence[Override], tasks: Sequence[str]) -> list[Override]:
    """The overrides, and one with these tasks in place of the recipe's; `recipe` means the recipe's own.

    Raises RecipeError where `recipe` does not stand alone.
    """
    if OWN not in tasks:
        return [*overrides, Override("eval.tasks", json.dumps(list(tasks), ensure_ascii=False))]
    if len(tasks) > 1:
        raise RecipeError(f"{OWN} stands for the recipe's tasks, alone", hint="write the others into the recipe")
    return list(overrides)


def own_recipe(trained: Trained, overrides: Sequence[Override]) -> LoadedRecipe:
    """The recipe of the model's run, or, of a model without one, the defaults."""
    if isinstance(trained, RunCheckpoint):
        return load_recipe(run_recipe(trained), overrides, Path.cwd())
    return load_recipe(any_model(trained.path), overrides)


def any_model(path: Path) -> dict[str, Any]:
    """The recipe of defaults for a model that no run of here has trained."""
    return {"model": {"name_or_path": str(path)}, "data": {"train": "-"}}


def scored(tasks: Sequence[ScoredTask], scorer: Respondent, console: Console) -> tuple[list[TaskScore], float]:
    """The scores of tasks, and the seconds that they took."""
    started, scores = time.monotonic(), []
    for task in tasks:
        with console.doing(f"scoring {task.name}"):
            scores.append(task.score(scorer))
    return scores, time.monotonic() - started


def score_tasks(
    trained: Trained, loaded: LoadedRecipe, rank_info: RankInfo, console: Console, output: Path | None = None
) -> TasksScore:
    """Score the model on the recipe's tasks; the results of items go to ``output``. Collective.

    Model, adapter and tokenizer are the directory's own; batch size and precision the recipe's, where `auto` is what
    the run had. Raises DataError and PluginError for tasks that cannot be used, and what loading a model raises.
    """
    recipe = recipe_of(trained, loaded, rank_info.world_size)
    if not recipe.eval.tasks:
        raise RecipeError("the recipe names no tasks", hint="name them: tuner eval MODEL --tasks FILE.jsonl")
    check_tasks(recipe.eval.tasks)
    spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    resolved = resolve(recipe, spec.max_length, rank_info, spec.tokenizer.new_ids)
    console.say("model", f"{trained.path} · {resolved.facts.kind}, {resolved.numerics.precision} compute")
    with joined(resolved, rank_info), tf32_products(recipe.train.tf32):
        with console.doing("loading model"):
            root, step_config = loaded_model(trained, resolved, rank_info)
        row_tokens = rows_at_once(recipe.train) * spec.max_length
        # With one copy among several processes, each answers prompts by all of them together.
        scorer = Scorer(root, step_config, spec.tokenizer, row_tokens, is_whole=not step_config.mesh.is_sharded)
        scores, seconds = scored(load_tasks(recipe.eval.tasks, spec.tokenizer, spec.max_length), scorer, console)
        if output is not None:
            Collective(gloo_group()).on_rank0(lambda: write_scores(output, scores))
    step = trained.checkpoint.step if isinstance(trained, RunCheckpoint) else None
    return TasksScore(trained.path, step, scores, seconds)
