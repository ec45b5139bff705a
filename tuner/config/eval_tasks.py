"""Tasks whose scores evaluations measure: where the items come from, and how they are put to the model."""

import re
from operator import attrgetter
from typing import Annotated

from tuner.config.numbers import CadenceSpan, Whole
from tuner.config.section import PLUGIN, Bool, Durations, Items, Options, Section
from tuner.config.value_types import Text, once

HARNESS = "lm_eval:"
"""Before the name of a task of lm-evaluation-harness."""
FILES = (".jsonl", ".jsonl.gz")
_NAME = r"[A-Za-z0-9][\w.-]*"
LOWER_IS_BETTER = frozenset({"perplexity", "bits_per_byte", "word_perplexity", "byte_perplexity", "brier_score"})
"""Figures of tasks of which a lower value is the better one."""
COUNTS = ("steps", "epochs", "tokens", "%")
_TASK = "a JSONL file, lm_eval:NAME, FILE.py:NAME or the name of an entry point"


class EvalTask(Section):
    """A task: items, and what is asked of them."""

    task: Annotated[str, Text(what=_TASK)]
    """JSONL file, lm_eval:NAME of lm-evaluation-harness, FILE.py:NAME, or an entry point of the group tuner.tasks."""
    name: Annotated[str | None, Text(what="letters, digits, '.', '_' and '-'", pattern=_NAME)] = None
    """Name in metrics.jsonl, as NAME/acc; null takes that of the file, the harness's task or the plug-in."""
    every: Annotated[Durations | None, CadenceSpan(units=COUNTS, aliases=())] = None
    """How often it is scored; null: at every evaluation. The first and last ones of a run score all tasks."""
    max_items: Annotated[int | None, Whole(ge=1, le=2**31)] = None
    """Items at most, the first ones; null takes all."""
    max_length: Annotated[int | None, Whole(ge=2, le=2**24)] = None
    """Tokens of an item at most: prompts lose their beginning, texts are cut into windows; null: data.max_length."""
    max_new_tokens: Annotated[int, Whole(ge=1, le=2**20)] = 64
    """Tokens of a generated answer at most."""
    chat: Bool = False
    """Put prompts into the tokenizer's chat template, as the user's turn."""
    scorer: Annotated[str | None, Text(what="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)] = None
    """Code of yours that scores a generated answer, in place of exact match; entry points: tuner.scorers."""
    options: Options = {}
    """Keyword arguments of the plug-in that task names, or else of the scorer."""
    num_fewshot: Annotated[int | None, Whole(ge=0, le=1000)] = None
    """Examples before each prompt of an lm_eval task; null: as the task says."""

    @property
    def is_harness(self) -> bool:
        """Whether it is a task of lm-evaluation-harness."""
        return self.task.startswith(HARNESS)

    @property
    def is_file(self) -> bool:
        """Whether the items are in a file."""
        return not self.is_harness and self.task.endswith(FILES)

    @property
    def label(self) -> str:
        """Its name in metrics.jsonl."""
        if self.name is not None:
            return self.name
        if self.is_harness:
            text = self.task.removeprefix(HARNESS).rpartition("/")[2].removesuffix(".yaml")
        elif self.is_file:
            text = self.task.rpartition("/")[2].split(".jsonl")[0]
        else:
            text = self.task.rpartition(":")[2]
        return re.sub(r"[^\w.-]", "_", text) or "task"


EVAL_TASKS = Items(EvalTask, "a file, a list of files or of {task, name, every, scorer, ...}", one=True, empty=True)


LABELS_ONCE = once(
    attrgetter("label"), "two tasks are called {!r}; give one a name of its own: {{task: ..., name: ...}}"
)


def task_of(metric: str | None, tasks: tuple[EvalTask, ...]) -> EvalTask | None:
    """The task that a metric such as `eval/arithmetic/acc` is a figure of; None where it is of none of them."""
    parts = [] if metric is None else metric.split("/")
    return next((task for task in tasks if len(parts) == 3 and parts[1] == task.label), None)
