"""Tasks as a recipe names them: items from a file, a plug-in of the user's, or lm-evaluation-harness."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuner.config.eval_tasks import EvalTask
from tuner.errors import DataError, MachineError, PluginError, RecipeError
from tuner.evals.task import AnswerScorer, Asker, IdSource, ItemsTask, ScoredTask, TaskItems, items_of, read_items
from tuner.runtime.plugins import load, naming, require_call, source_file
from tuner.runtime.process import Collective, gloo_group

INSTALL = "install it: pip install lm-eval"


def check_tasks(tasks: Sequence[EvalTask]) -> None:
    """Check that files can be read and code fits, before a model is loaded; plug-ins are not called.

    Raises DataError, PluginError, and MachineError where lm-evaluation-harness is not installed.
    """
    for task in tasks:
        if task.is_harness:
            require_harness(task)
        elif task.is_file:
            items = read_items(Path(task.task), task.max_items)
            if task.scorer is not None and items.kind != "question":
                raise DataError(
                    f"{task.task}: a scorer marks generated answers, and these items are of the kind {items.kind}",
                    hint="remove the task's scorer",
                )
        else:
            require_call(load(task.task, "tuner.tasks"), task.task, (), task.options)
        if task.scorer is not None:
            options = task.options if task.is_file else {}
            require_call(load(task.scorer, "tuner.scorers"), task.scorer, ("answer", "item"), options)


def load_tasks(tasks: Sequence[EvalTask], tokenizer: IdSource, max_length: int) -> list[ScoredTask]:
    """The tasks with their items, of which every process gets those of the first. Collective.

    ``max_length`` is that of tasks that name none. Raises DataError, PluginError, MachineError, RecipeError.
    """
    return [_loaded(task, tokenizer, max_length) for task in tasks]


def require_harness(task: EvalTask) -> None:
    """Check that lm-evaluation-harness is there. Raises MachineError."""
    if find_spec("lm_eval") is None:
        raise MachineError(f"eval.tasks {task.task}: lm-evaluation-harness is not installed", hint=INSTALL)


def require_figure(metric: str, task: EvalTask, loaded: ScoredTask) -> None:
    """Raise RecipeError for a metric that a task does not measure, naming those that it does."""
    names = loaded.figures
    if names is not None and metric.split("/")[2] not in names:
        measured = " or ".join(f"eval/{task.label}/{name}" for name in names)
        raise RecipeError(f"checkpoint.keep_best: no task measures {metric}", hint=f"write {measured}")


def _loaded(task: EvalTask, tokenizer: IdSource, max_length: int) -> ScoredTask:
    asker = Asker(tokenizer, task.max_length or max_length, task.chat)
    if task.chat and not tokenizer.has_template:
        raise RecipeError(
            f"eval.tasks {task.label}: chat: true, and the tokenizer has no chat template",
            hint="write chat: false, or train with tokenizer.chat_template: chatml",
        )
    if task.is_harness:
        require_harness(task)
        from tuner.evals.harness import HarnessTask

        return HarnessTask(task, asker)
    items = Collective(gloo_group()).on_rank0(partial(_items, task))
    if items.kind == "question" and task.max_new_tokens >= asker.longest:
        raise RecipeError(
            f"eval.tasks {task.label}: max_new_tokens {task.max_new_tokens} leaves no room for a prompt in "
            f"{asker.longest} tokens",
            hint="lower max_new_tokens, or raise the task's max_length",
        )
    return ItemsTask(task.label, items, asker, task.max_new_tokens, _scorer(task))


def _items(task: EvalTask) -> TaskItems:
    if task.is_file:
        return read_items(Path(task.task), task.max_items)
    plugin, options = load(task.task, "tuner.tasks"), copy.deepcopy(task.options)
    with naming(f"eval.tasks {task.label} ({task.task})", source_file(plugin), (DataError,)):
        records: Iterable[Mapping[str, Any]] = plugin(**options)
        if not isinstance(records, Iterable):
            raise PluginError(f"{task.task} gave no items", hint="return a list of items, or yield them")
        return items_of(records, task.task, task.max_items)


def _scorer(task: EvalTask) -> AnswerScorer | None:
    if task.scorer is None:
        return None
    scorer = load(task.scorer, "tuner.scorers")
    return partial(scorer, **copy.deepcopy(task.options)) if task.is_file and task.options else scorer
