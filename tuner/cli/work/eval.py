"""What `tuner eval` does and shows: losses and figures of held-out rows, or scores of tasks."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.cli.command import Outcome, is_recipe_here, load_for_command
from tuner.cli.output import columns
from tuner.config.load import LoadedRecipe, Override, load_recipe
from tuner.errors import RecipeError, counted
from tuner.run.score import (
    Score,
    TasksScore,
    Trained,
    any_model,
    find_trained,
    own_recipe,
    run_recipe,
    score,
    score_tasks,
    with_tasks,
)
from tuner.run.score_gguf import score_gguf
from tuner.rundir.model_path import HubModel, RunCheckpoint
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.train.evaluate import Evaluation

OF_THE_MODEL = ("model.", "adapter.", "tokenizer.")
OF_TASKS = ("eval.tasks", "data.max_length")
"""What of a recipe says how tasks are put to a file that is served."""


def evaluate(
    path: Path | HubModel, recipe: str | None, flags: list[Override], tasks: Sequence[str] | None, output: str | None,
    console: Console,
) -> Outcome:
    """Score a model's tasks, where some are named, or else its held-out rows."""
    rank_info = RankInfo.from_environment()
    trained = find_trained(path, console)
    _check_flags(trained, flags)
    if not tasks:
        result = score(trained, _load(trained, recipe, flags), rank_info, console)
        _show(result, console)
        return _outcome(result)
    overrides = with_tasks(flags, tasks)
    loaded = own_recipe(trained, overrides) if recipe is None else load_for_command(recipe, overrides, fetches=True)
    place = _place(output)
    return _shown_tasks(score_tasks(trained, loaded, rank_info, console, place), place, console)


def evaluate_served(
    path: Path, recipe: str | None, flags: list[Override], tasks: list[str], output: str | None, console: Console
) -> Outcome:
    """Score tasks on a GGUF file. Raises RecipeError without tasks, and for flags that do nothing."""
    if not tasks:
        raise RecipeError("llama.cpp scores tasks, not the rows of a recipe", hint="add --tasks FILE.jsonl")
    wrong = next((flag.key for flag in flags if not flag.key.startswith(OF_TASKS)), None)
    if wrong is not None:
        raise RecipeError(f"flag --{wrong}: does not concern a file that is served; --data.max_length does")
    overrides = with_tasks(flags, tasks)
    loaded = load_for_command(recipe, overrides, fetches=True) if recipe else load_recipe(any_model(path), overrides)
    place = _place(output)
    sections, length = loaded.recipe.eval.tasks, loaded.recipe.data.max_length
    if not sections:
        raise RecipeError("the recipe names no tasks")
    return _shown_tasks(score_gguf(path, sections, length, console, place), place, console)


def _place(output: str | None) -> Path | None:
    return None if output is None else Path(os.path.abspath(Path(output).expanduser()))


def _shown_tasks(found: TasksScore, place: Path | None, console: Console) -> Outcome:
    figures = found.figures()
    for one in found.scores:
        if one.cut:
            cut = counted(one.cut, "prompt")
            console.warn(f"{one.name}: {cut} without the beginning; raise the task's max_length")
        console.say("scored", f"{one.name}: {counted(len(one.results), 'item')} in {one.seconds:.1f} s")
    width = max(map(len, figures))
    return Outcome(
        "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in figures.items()),
        artifacts={"path": str(found.path), **({} if place is None else {"results": str(place)})},
        metrics={**figures, "step": found.step, "seconds": round(found.seconds, 3)}, is_text=True,
        next=None if place is None else f"tuner compare {place} OTHER",
    )


def _load(trained: Trained, recipe: str | None, flags: list[Override]) -> LoadedRecipe:
    """The recipe given, or the run's own."""
    if recipe is None and (isinstance(trained, RunCheckpoint) or not is_recipe_here()):
        return load_recipe(run_recipe(trained), flags)
    return load_for_command(recipe, flags, fetches=True)


def _check_flags(trained: Trained, flags: list[Override]) -> None:
    """Raise RecipeError for a flag that would change the model, or do nothing."""
    wrong = next((flag.key for flag in flags if flag.key.startswith(OF_THE_MODEL)), None)
    if wrong is not None:
        raise RecipeError(f"flag --{wrong}: the model is {trained.path}'s own", hint="leave it out")
    if any(flag.key == "parallel.processes" for flag in flags):
        raise RecipeError(
            "flag --parallel.processes: eval runs in one process",
            hint="leave it out, or start several: torchrun --nproc-per-node 2 -m tuner eval ...",
        )


def _outcome(score: Score) -> Outcome:
    whole = score.evaluation
    sources = {name: _figures(part) for name, part in whole.sources.items()}
    figures = _figures(whole)
    return Outcome(
        repr(whole.loss), artifacts={"path": str(score.path), "measure": score.measure, "sources": sources},
        metrics={**figures, "step": score.step, "rows": score.rows, "seconds": round(score.seconds, 3)}, is_text=True,
    )


def _figures(part: Evaluation) -> dict[str, Any]:
    """A loss per token has a perplexity; one of the method's own has the method's figures."""
    own = part.figures or {"perplexity": perplexity(part.loss)}
    return {"loss": part.loss, **own, "tokens": part.tokens}


def perplexity(loss: float) -> float:
    """e to the power of the loss; infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _show(score: Score, console: Console) -> None:
    whole = score.evaluation
    parts = [*whole.sources.items(), ("all" if whole.sources else "data.eval", whole)]
    figures = tuple(whole.figures)
    if not figures:
        lines = [["", "loss", "perplexity", "tokens"]]
        lines += [[name, f"{p.loss:.4f}", f"{perplexity(p.loss):,.2f}", f"{p.tokens:,}"] for name, p in parts]
        shown = columns(lines, right=(1, 2, 3))
    else:  # there may be more of them than a line has room for: one below the other
        values = [(name, {"loss": p.loss, **p.figures}, p.tokens) for name, p in parts]
        lines = [["", *(name for name, _, _ in values)]]
        lines += [[n, *(f"{of[n]:.4f}" if n in of else "-" for _, of, _ in values)] for n in ("loss", *figures)]
        lines += [["tokens", *(f"{tokens:,}" for _, _, tokens in values)]]
        shown = columns(lines, right=range(1, len(lines[0])))
    for line in shown.split("\n"):
        console.line(line)
