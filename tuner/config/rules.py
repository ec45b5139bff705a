"""Rules between fields: each names the keys it looks at and returns what is wrong, if anything."""

from collections.abc import Set
from difflib import get_close_matches
from itertools import pairwise

from tuner.config.eval_tasks import task_of
from tuner.config.methods import CustomMethod
from tuner.config.recipe import SECTIONS, STEP_FIGURES, Recipe
from tuner.config.section import Rule, table_rules
from tuner.config.store_rules import STORE_RULES


def _cadence_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    if "eval.every" not in given or recipe.eval.every is None or recipe.data.eval is not None or recipe.eval.tasks:
        return None
    return "an evaluation cadence needs held-out rows; set data.eval, such as 2%, or eval.every: never"


def _best_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    metric = recipe.checkpoint.keep_best
    task = task_of(metric, recipe.eval.tasks)
    if metric is None or (task is not None and task.every is not None):
        return None
    if task is None and recipe.data.eval is None and not recipe.eval.tasks:
        return "needs held-out rows; set data.eval, such as 2%, or keep_best: null"
    if recipe.eval.every is None and not recipe.eval.at_end:
        return "needs evaluations; set eval.every, such as 10%, or keep_best: null"
    return None


def _best_is_measured(recipe: Recipe, given: Set[str]) -> str | None:
    metric, figures = recipe.checkpoint.keep_best, recipe.method.figures
    if metric is None or metric.split("/")[1] in {"loss", *figures} or task_of(metric, recipe.eval.tasks) is not None:
        return None
    own = [f"eval/{task.label}/FIGURE" for task in recipe.eval.tasks]
    names = " or ".join([*(f"eval/{name}" for name in ("loss", *figures)), *own])
    return f"is not measured with method.kind: {recipe.method.kind}; write {names}"


def _patience_needs_rows(recipe: Recipe, given: Set[str]) -> str | None:
    is_measured = recipe.data.eval is not None or task_of(recipe.checkpoint.keep_best, recipe.eval.tasks) is not None
    if recipe.eval.patience is None or is_measured:
        return None
    return "needs held-out rows; set data.eval, such as 2%, or keep_best: eval/TASK/acc, or patience: null"


def _tasks_have_names_of_their_own(recipe: Recipe, given: Set[str]) -> str | None:
    figures = {"loss", *recipe.method.figures}
    taken = next((task.label for task in recipe.eval.tasks if task.label in figures), None)
    if taken is None:
        return None
    return f"a task called {taken} would be taken for the method's own figure; give it a name: {{task: ..., name: ...}}"


def _harness_scores_its_tasks(recipe: Recipe, given: Set[str]) -> str | None:
    for task in recipe.eval.tasks:
        if task.is_harness and (task.scorer is not None or task.options):
            return f"{task.task} is scored by lm-evaluation-harness; remove its scorer and options"
        if not task.is_harness and task.num_fewshot is not None:
            return f"num_fewshot is of tasks of lm-evaluation-harness; remove it: {task.label}'s prompts hold them"
        if task.is_file and task.options and task.scorer is None:
            return f"{task.label} has options and neither code nor a scorer that takes them; remove the options"
    return None


def _micro_divides_global(recipe: Recipe, given: Set[str]) -> str | None:
    train = recipe.train
    if train.micro_batch_size == "auto" or train.global_batch_size % train.micro_batch_size == 0:
        return None
    got, whole = train.micro_batch_size, train.global_batch_size
    return f"got {got}; allowed: a divisor of train.global_batch_size, which is {whole}"


_SHAPE = frozenset((
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
))  # fmt: skip
"""Keys of a model's config that say how large its weights are."""


def _config_needs_random(recipe: Recipe, given: Set[str]) -> str | None:
    changed = sorted(_SHAPE & set(recipe.model.config))
    if recipe.model.init == "random" or not changed:
        return None
    return f"{changed[0]} changes the shape of pretrained weights; set model.init: random"


def _pretrain_takes_text(recipe: Recipe, given: Set[str]) -> str | None:
    other = next((each.format for each in recipe.data.train if each.format not in {"auto", "text", "tokens"}), None)
    if other is None or recipe.method.examples.kind != "pretrain":
        return None
    return f"got format {other}; method.kind pretrain reads text; set format: text or method.kind: sft"


def _compared_answers_are_chats_or_texts(recipe: Recipe, given: Set[str]) -> str | None:
    sources = (*recipe.data.train, *(recipe.data.eval if isinstance(recipe.data.eval, tuple) else ()))
    other = next((source.format for source in sources if source.format in {"text", "tokens"}), None)
    if other is None or not recipe.method.examples.compares:
        return None
    return f"got format {other}; method.kind {recipe.method.kind} compares answers to prompts; set format: auto"


def _batches_change_in_order(recipe: Recipe, given: Set[str]) -> str | None:
    """Changes in the same unit; for others the rows have to be counted, as the launch does (train/plan.py)."""
    changes = recipe.train.batch_schedule
    for before, item in pairwise(changes):
        if item.after.unit == before.after.unit and item.after.count <= before.after.count:
            ordered = sorted({change.after: change for change in changes}.values(), key=lambda one: one.after.count)
            items = ", ".join(f"{{after: {one.after}, size: {one.size}}}" for one in ordered)
            return f"{item.after} is not after the change before it, {before.after}; write [{items}]"
    return None


def _shown_figures_are_logged(recipe: Recipe, given: Set[str]) -> str | None:
    known = (*STEP_FIGURES, *recipe.method.figures)
    unknown = next((name for name in recipe.logging.console if name not in known), None)
    if unknown is None or isinstance(recipe.method, CustomMethod):  # only its code knows what it measures
        return None
    near = get_close_matches(unknown, known, 1)
    meant = [one for name in recipe.logging.console for one in (near if name == unknown else [name])]
    return f"no step has {unknown} with method.kind: {recipe.method.kind}; write [{', '.join(meant)}]"


RULES: tuple[Rule, ...] = (
    *table_rules("rules"),
    Rule(("train.batch_schedule",), _batches_change_in_order),
    Rule(("logging.console", "method.kind"), _shown_figures_are_logged),
    Rule(("eval.every", "data.eval", "eval.tasks"), _cadence_needs_rows),
    Rule(("checkpoint.keep_best", "data.eval", "eval.every", "eval.tasks"), _best_needs_rows),
    Rule(("checkpoint.keep_best", "method.kind", "eval.tasks"), _best_is_measured),
    Rule(("eval.patience", "data.eval", "eval.tasks"), _patience_needs_rows),
    Rule(("eval.tasks", "method.kind"), _tasks_have_names_of_their_own),
    Rule(("eval.tasks",), _harness_scores_its_tasks),
    Rule(("train.micro_batch_size", "train.global_batch_size"), _micro_divides_global),
    Rule(("model.config", "model.init"), _config_needs_random),
    Rule(("data.train", "method.kind"), _pretrain_takes_text),
    Rule(("data.train", "data.eval", "method.kind"), _compared_answers_are_chats_or_texts),
    *STORE_RULES,
    *(rule for section in SECTIONS.values() for rule in section.rules),
)
