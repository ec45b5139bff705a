"""Scores of a trained model on tasks, outside of any run: what `tuner eval --tasks` does."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.load import LoadedRecipe, load_recipe
from tuner.config.overrides import Override
from tuner.data.building.spec import prepare_spec
from tuner.errors import RecipeError
from tuner.evals.load import check_tasks, load_tasks
from tuner.evals.scorer import Scorer
from tuner.evals.task import Respondent, ScoredTask, TaskScore
from tuner.run.score import Trained, loaded_model, recipe_of, run_recipe
from tuner.run.tasks.task_scores import write_scores
from tuner.rundir.model_path import RunCheckpoint
from tuner.runtime.console import Console
from tuner.runtime.deterministic import tf32_products
from tuner.runtime.dist import RankInfo
from tuner.runtime.process import Collective, gloo_group
from tuner.setup.resolve import resolve
from tuner.setup.settled import rows_at_once
from tuner.setup.specs import joined

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
