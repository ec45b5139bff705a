"""A task with its items: asks the model, and makes results and figures of what it says."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.errors import PluginError
from tuner.evals.figures import Result, figures_of
from tuner.evals.items import ChoiceItem, QuestionItem, TaskItems, TextItem
from tuner.evals.requests import Asker, Likelihood, Respondent
from tuner.runtime.plugins import naming, source_file
from tuner.runtime.process import Collective, gloo_group

AnswerScorer = Callable[..., Any]
"""From a generated answer and the item's record to a number, a truth value, or several numbers by name."""
OF_KIND: dict[str, tuple[str, ...]] = {
    "choice": ("acc", "acc_norm", "bits_per_byte"),
    "text": ("perplexity", "bits_per_byte"),
    "question": ("exact_match",),
}
"""The figures of each kind of items."""


@dataclass(frozen=True)
class TaskScore:
    """What a task measured: figures by name, in the order in which they are shown, and the results of its items."""

    name: str
    figures: Mapping[str, float]
    results: Sequence[Result]
    seconds: float
    cut: int = 0
    """Prompts that lost their beginning."""

    def line(self) -> dict[str, float]:
        """The figures as `metrics.jsonl` names them."""
        return {f"{self.name}/{name}": value for name, value in self.figures.items()}


class ScoredTask(ABC):
    """A task that can be scored, on every process alike."""

    name: str

    @property
    @abstractmethod
    def figures(self) -> tuple[str, ...] | None:
        """The names of its figures; None where they are known once it was scored."""

    @abstractmethod
    def score(self, scorer: Respondent) -> TaskScore:
        """Ask the model. Collective."""


@dataclass(frozen=True)
class ItemsTask(ScoredTask):
    """A task whose items came from a file or a plug-in."""

    name: str
    items: TaskItems
    asker: Asker
    max_new_tokens: int
    answer_scorer: AnswerScorer | None = None

    @property
    def figures(self) -> tuple[str, ...] | None:
        """Those of its kind of items; a scorer of the user's names its own."""
        return None if self.answer_scorer is not None else OF_KIND[self.items.kind]

    def score(self, scorer: Respondent) -> TaskScore:
        """Ask the model about each item. Collective."""
        started = time.monotonic()
        ways = {"choice": self._choices, "text": self._texts, "question": self._questions}
        found, cut = ways[self.items.kind](scorer)
        results = [{"id": own, **one} for own, one in zip(self.items.ids, found, strict=True)]
        figures = {name: figure.value for name, figure in figures_of(results).items()}
        return TaskScore(self.name, figures, results, time.monotonic() - started, cut)

    def _choices(self, scorer: Respondent) -> tuple[list[dict[str, Any]], int]:
        items = [item for item in self.items.items if isinstance(item, ChoiceItem)]
        asked = [self.asker.answer(item.prompt, choice) for item in items for choice in item.choices]
        requests, cut = self.asker.fitted(asked)
        said = iter(scorer.likelihoods(requests))
        return [_chosen(item, [next(said) for _ in item.choices]) for item in items], cut

    def _texts(self, scorer: Respondent) -> tuple[list[dict[str, Any]], int]:
        texts = [item.text for item in self.items.items if isinstance(item, TextItem)]
        windows = [list(self.asker.windows(text)) for text in texts]
        said = iter(scorer.likelihoods([request for own in windows for request in own]))
        results = []
        for text, own in zip(texts, windows, strict=True):
            nats = -sum(next(said).log_likelihood for _ in own)
            tokens = sum(len(request.continuation) for request in own)
            results.append({"sums": {"nats": nats, "tokens": tokens, "bytes": len(text.encode("utf-8", "replace"))}})
        return results, 0

    def _questions(self, scorer: Respondent) -> tuple[list[dict[str, Any]], int]:
        items = [item for item in self.items.items if isinstance(item, QuestionItem)]
        whole = [self.asker.prompt(item.prompt) for item in items]
        room = self.asker.longest - self.max_new_tokens
        prompts = [ids[-room:] for ids in whole]
        cut = sum(len(ids) > room for ids in whole)
        answers = scorer.answers(prompts, [self.max_new_tokens] * len(items), [item.stop for item in items])
        figures = Collective(gloo_group()).on_rank0(lambda: self._marked(items, answers))
        return [{"figures": marks, "answer": answer} for marks, answer in zip(figures, answers, strict=True)], cut

    def _marked(self, items: Sequence[QuestionItem], answers: Sequence[str]) -> list[dict[str, float]]:
        """The figures of each answer. Raises PluginError for a scorer that fails or gives no numbers."""
        own = self.answer_scorer
        if own is None:
            right = [{text.strip() for text in item.answers} for item in items]
            return [{"exact_match": float(said.strip() in texts)} for said, texts in zip(answers, right, strict=True)]
        file, marks = source_file(getattr(own, "func", own)), []  # options are bound by a partial
        for record, answer in zip(self.items.records, answers, strict=True):
            with naming(f"the scorer of eval.tasks {self.name}", file, (PluginError,)):
                marks.append(_numbers(own(answer, dict(record)), self.name))
        return marks


def _chosen(item: ChoiceItem, said: Sequence[Likelihood]) -> dict[str, Any]:
    """The result of an item: of equally likely choices the first one is taken."""
    nats = np.array([one.log_likelihood for one in said])
    letters = np.array([len(choice) for choice in item.choices])
    picked, by_letter = int(np.argmax(nats)), int(np.argmax(nats / letters))
    right = item.choices[item.answer].encode("utf-8", "replace")
    figures = {
        "acc": float(picked == item.answer),
        "acc_norm": float(by_letter == item.answer),
        "bits_per_byte": float(-nats[item.answer] / np.log(2) / len(right)),
    }
    return {"figures": figures, "picked": picked, "answer": item.answer, "log_likelihoods": nats.tolist()}


def _numbers(value: object, name: str) -> dict[str, float]:
    """What a user's scorer gave, by name. Raises PluginError for what is no number."""
    named: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"score": value}
    if not named or not all(isinstance(one, (bool, int, float)) for one in named.values()):
        raise PluginError(
            f"the scorer of eval.tasks {name} gave {value!r}",
            hint="return a number, True or False, or a dict of numbers by name",
        )
    return {str(key): float(one) for key, one in named.items()}
