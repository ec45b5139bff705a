"""The loss of a trained model on a recipe's held-out rows, outside of any run: what `tuner eval` does."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from tuner.checkpoint.load import load_into, require_same_base
from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.recipe import ModelSection, NoAdapter, Recipe
from tuner.data.building.prepare import prepare_to_use
from tuner.data.building.spec import prepare_spec
from tuner.data.prepared import open_prepared
from tuner.errors import DataError, DivergedError, RecipeError
from tuner.model.root import trained_parameters
from tuner.rundir.layout import MODEL_PREFIX, RESOLVED_RECIPE
from tuner.rundir.model_path import HfDirectory, RunCheckpoint, resolve_model_path
from tuner.runtime.console import Console
from tuner.runtime.deterministic import tf32_products
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import process_group
from tuner.setup.build import assemble_model, check_fits, held_out_rows, mesh_of
from tuner.setup.resolve import resolve
from tuner.setup.settled import rows_at_once
from tuner.train.evaluate import Evaluation, evaluate

Trained = RunCheckpoint | HfDirectory
"""A model to evaluate."""


@dataclass(frozen=True)
class Score:
    """What was evaluated, and what came out."""

    path: Path
    step: int | None
    """The checkpoint's step; None for a Hugging Face directory."""
    evaluation: Evaluation
    rows: int
    seconds: float


def find_trained(path: Path, console: Console) -> Trained:
    """A run's last checkpoint, the checkpoint given, or a Hugging Face directory.

    Raises RecipeError for a path that is none of them, and DataError for a checkpoint that is damaged or gone.
    """
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
    `auto` is what the run had. Raises RecipeError for a recipe without held-out rows, DivergedError where the loss is
    not finite.
    """
    recipe = _recipe(trained, loaded)
    if recipe.data.eval is None:
        raise RecipeError("the recipe has no held-out rows", hint="name them: --data.eval FILE, or 2%")
    with console.doing("reading the data"):
        spec = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, loaded.recipe.seed)
        data = open_prepared(prepare_to_use(spec, console))
        resolved = resolve(recipe, spec.max_length, rank_info, spec.tokenizer.new_ids)
    held = held_out_rows(resolved.recipe, data)
    if held is None:
        raise DataError(f"{data.path}: holds no held-out rows")
    console.say("model", f"{trained.path} · {resolved.facts.kind}, {resolved.recipe.train.precision} compute")
    joined = process_group(rank_info, resolved.facts.kind, recipe.parallel.timeout.seconds)
    with joined, tf32_products(resolved.recipe.train.tf32):
        check_fits(spec.tokenizer, resolved.config, data)
        with console.doing("loading model"):
            root, step_config = assemble_model(resolved, rank_info, mesh_of(resolved.recipe, rank_info))
            if isinstance(trained, RunCheckpoint):
                require_same_base(trained.checkpoint, root.frozen_hash)
                tensors = {f"{MODEL_PREFIX}{name}": p.data for name, p in trained_parameters(root).items()}
                load_into(trained.checkpoint, tensors, prefix=MODEL_PREFIX)
        started = time.monotonic()
        micro_batch_size, max_rows = rows_at_once(resolved.recipe), resolved.recipe.eval.max_rows
        rows = len(held.rows) if max_rows is None else min(max_rows, len(held.rows))
        with console.doing(f"evaluating {rows:,} rows"):
            result = evaluate(root, step_config, held, micro_batch_size, max_rows)
        seconds = time.monotonic() - started
    if not math.isfinite(result.loss):
        raise DivergedError(f"{trained.path}: the loss is {result.loss}", hint="look at the run: tuner runs plot RUN")
    step = trained.checkpoint.step if isinstance(trained, RunCheckpoint) else None
    return Score(trained.path, step, result, rows, seconds)


def run_recipe(trained: Trained) -> Path:
    """The resolved recipe of the run that the model belongs to. Raises RecipeError where it has none."""
    path = trained.run_dir / RESOLVED_RECIPE if isinstance(trained, RunCheckpoint) else None
    if path is None or not path.is_file():
        raise RecipeError(f"{trained.path}: no recipe names held-out rows", hint="give one: tuner eval MODEL RECIPE")
    return path


def _recipe(trained: Trained, loaded: LoadedRecipe) -> Recipe:
    """The recipe with the directory's own model in place of its own."""
    plain = loaded.recipe.train.model_copy(update={"compile": False})  # no layer is compiled for evaluation
    recipe = loaded.recipe.model_copy(update={"train": plain})
    if isinstance(trained, HfDirectory):
        model = ModelSection(name_or_path=str(trained.path), kernels=recipe.model.kernels)
        tokenizer = recipe.tokenizer.model_copy(update={"add_tokens": ()})  # what was added is in its own by now
        return recipe.model_copy(update={"model": model, "adapter": NoAdapter(), "tokenizer": tokenizer})
    own = load_recipe(run_recipe(trained)).recipe
    had = {key: getattr(own.train, key) for key in ("precision", "micro_batch_size")}
    update = {key: value for key, value in had.items() if getattr(recipe.train, key) == "auto"}
    train = recipe.train.model_copy(update=update)
    # The seed too: frozen weights may have been drawn from it.
    sections = {"model": own.model, "adapter": own.adapter, "tokenizer": own.tokenizer, "seed": own.seed}
    return recipe.model_copy(update={**sections, "train": train})
