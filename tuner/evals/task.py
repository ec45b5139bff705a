"""A task with its items: asks the model, and makes results and figures of what it says.

Items are as a JSONL file or a plug-in gives them: one form for each kind, which its keys decide. What is asked of the
model is in token ids, such as the likelihood of a continuation after its context. Texts become tokens as
lm-evaluation-harness makes them: context and continuation are encoded together and cut where the context's tokens end,
and white space at the end of a context belongs to the continuation.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from tuner.data.reading.blocks import blocks, lines_in, records_of
from tuner.data.sources import SourceFile
from tuner.errors import DataError, PluginError
from tuner.evals.figures import Result, figures_of
from tuner.runtime.plugins import naming, source_file
from tuner.runtime.process import Collective, gloo_group


@dataclass(frozen=True)
class ScoreRequest:
    """A continuation whose likelihood after a context is asked for; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def cut(self, longest: int) -> ScoreRequest:
        """The same with the end of the context alone, where the forward would have more than ``longest`` tokens."""
        kept = longest + 1 - len(self.continuation)
        return self if kept >= len(self.context) else ScoreRequest(self.context[-kept:], self.continuation)


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation in nats, and whether greedy decoding would write it."""

    log_likelihood: float
    is_greedy: bool


class Respondent(Protocol):
    """A model that answers."""

    @property
    def device(self) -> Any:
        """Where it computes."""

    def likelihoods(self, requests: Sequence[ScoreRequest]) -> list[Likelihood]:
        """The likelihood of each request, in their order. Collective."""

    def answers(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> list[str]:
        """The greedy answer to each prompt, in at most so many tokens, before the first of its ``stops``."""


class IdSource(Protocol):
    """What makes ids of texts and texts of messages, as :class:`~tuner.data.encoding.tokenizer.TextTokenizer` does."""

    @property
    def text_prefix(self) -> list[int]:
        """Ids before a text."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text or a turn."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token` and `eos_token`, where there are such."""

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""

    @property
    def hash(self) -> str:
        """What decides the ids of a text."""

    @property
    def template_hash(self) -> str | None:
        """The same of the template."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any around it."""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> str:
        """Messages as text."""


@dataclass(frozen=True)
class Asker:
    """Makes requests of texts with a tokenizer; a forward has at most ``longest`` tokens."""

    tokenizer: IdSource
    longest: int
    chat: bool = False
    """Whether prompts are a user's turn in the chat template."""

    def prompt(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt that is answered. Raises DataError where the tokenizer has no chat template."""
        if not self.chat:
            return tuple(self.tokenizer.text_prefix + self.tokenizer.encode(text)) or (self.first_id,)
        return tuple(self.tokenizer.encode(self._rendered(text)))

    def pair(self, context: str, continuation: str) -> ScoreRequest:
        """The request of a continuation after a context, each as it stands."""
        if self.chat:
            return self._request(self._rendered(context), continuation, [])
        kept = context.rstrip()
        return self._request(kept, context[len(kept) :] + continuation, self.tokenizer.text_prefix)

    def answer(self, prompt: str, choice: str) -> ScoreRequest:
        """The request of a choice after its prompt: a space goes between them where neither has white space there."""
        is_apart = self.chat or not prompt or prompt[-1].isspace() or choice[0].isspace()
        return self.pair(prompt, choice if is_apart else f" {choice}")

    def windows(self, text: str) -> Iterator[ScoreRequest]:
        """A text as requests of at most ``longest`` tokens, each token of it in one of them.

        Before the first one stands the token that begins a text, before each other one the token that precedes it; the
        last one, which is shorter, has as many tokens before it as there is room for.
        """
        ids = (self.first_id, *self.tokenizer.text_prefix, *self.tokenizer.encode(text))
        for start in range(1, len(ids), self.longest):
            window = ids[start : start + self.longest]
            yield ScoreRequest(ids[max(0, start - (self.longest + 1 - len(window))) : start], window)

    @property
    def first_id(self) -> int:
        """What stands before the first token of a text: the tokenizer's beginning, or else its end of a text."""
        for name in ("bos_token", "eos_token"):
            token = self.tokenizer.special_tokens.get(name)
            found = [] if token is None else self.tokenizer.encode(token)
            if len(found) == 1:
                return found[0]
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else 0

    def fitted(self, requests: Sequence[ScoreRequest]) -> tuple[list[ScoreRequest], int]:
        """Requests whose contexts leave room in a forward, and how many of them lost their beginning."""
        fitted = [request.cut(self.longest) for request in requests]
        return fitted, sum(before.context != after.context for before, after in zip(requests, fitted, strict=True))

    def _rendered(self, prompt: str) -> str:
        return self.tokenizer.render([{"role": "user", "content": prompt}], add_generation_prompt=True)

    def _request(self, context: str, continuation: str, prefix: Sequence[int]) -> ScoreRequest:
        whole = [*prefix, *self.tokenizer.encode(context + continuation)]
        before = [*prefix, *self.tokenizer.encode(context)]
        request = ScoreRequest(tuple(whole[: len(before)]), tuple(whole[len(before) :]))
        if not before:
            request = ScoreRequest((self.first_id,), tuple(whole))
        if not request.continuation:
            shown = repr(continuation[:40])
            raise DataError(f"{shown} has no tokens of its own after its prompt", hint="leave the item out")
        if len(request.continuation) > self.longest:
            raise DataError(
                f"an answer has {len(request.continuation):,} tokens, and a forward takes {self.longest:,}",
                hint="raise the task's max_length, such as {task: ..., max_length: 4096}",
            )
        return request


Kind = Literal["choice", "text", "question"]
MOST_ITEMS = 1 << 18
"""Items are held in memory, some kB each."""
FORMS = '{"prompt", "choices", "answer"}, {"text"} or {"prompt", "answer"}'


@dataclass(frozen=True)
class ChoiceItem:
    """Answers to a prompt, of which one is right: the model's choice is the most likely one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int
    """The right one, from 0."""


@dataclass(frozen=True)
class TextItem:
    """A text whose perplexity is measured."""

    text: str


@dataclass(frozen=True)
class QuestionItem:
    """A prompt that is answered by generating, and any of the answers that are right."""

    prompt: str
    answers: tuple[str, ...]
    stop: tuple[str, ...] = ()
    """A generated answer ends before the first of these."""


Item = ChoiceItem | TextItem | QuestionItem


@dataclass(frozen=True)
class TaskItems:
    """The items of a task, all of one kind, with the records that they came from."""

    kind: Kind
    items: Sequence[Item]
    records: Sequence[Mapping[str, Any]]
    ids: Sequence[str]
    """12 hexadecimal digits each: the beginning of the SHA-256 of the record, by which two evaluations are paired."""


def read_items(path: Path, max_items: int | None = None) -> TaskItems:
    """The items of a JSONL file, which may be compressed by gzip. Raises DataError with the line that is wrong."""
    return items_of(_records(path), str(path), max_items)


def items_of(records: Iterable[Mapping[str, Any]], source: str, max_items: int | None = None) -> TaskItems:
    """The items that records are. Raises DataError for a record of no form, or of another kind than the first."""
    kind: Kind | None = None
    items: list[Item] = []
    kept: list[Mapping[str, Any]] = []
    for number, record in enumerate(islice(records, max_items), 1):
        if len(items) == MOST_ITEMS:
            raise DataError(f"{source}: holds more than {MOST_ITEMS:,} items", hint="set max_items, or divide the file")
        item = item_of(record, f"{source}:{number}")
        own = kind_of(item)
        if kind is not None and own != kind:
            raise DataError(
                f"{source}:{number}: is of the kind {own}, and those before it are of the kind {kind}",
                hint="write items of another kind to a file of their own",
            )
        kind = own
        items.append(item)
        kept.append(record)
    if kind is None:
        raise DataError(f"{source}: holds no items", hint=f"write one a line: {FORMS}")
    return TaskItems(kind, items, kept, [id_of(record) for record in kept])


def kind_of(item: Item) -> Kind:
    """What is asked of an item."""
    return "choice" if isinstance(item, ChoiceItem) else "text" if isinstance(item, TextItem) else "question"


def item_of(record: object, where: str) -> Item:
    """The item that a record is. Raises DataError with its place."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: is no object", hint=f"write one a line: {FORMS}")
    if "choices" in record:
        return _choice(record, where)
    if "text" in record:
        if not (text := _text(record, "text", where)):
            raise DataError(f"{where}: text is empty", hint="leave the item out")
        return TextItem(text)
    if "prompt" not in record or "answer" not in record:
        keys = ", ".join(map(str, record)) or "no keys"
        raise DataError(f"{where}: has {keys}, which is no form of an item", hint=f"write {FORMS}")
    answers, stops = _texts(record, "answer", where), _texts(record, "stop", where, ())
    return QuestionItem(_text(record, "prompt", where), answers, stops)


def id_of(record: Mapping[str, Any]) -> str:
    """What a record is known by: the same for the same keys and values, in any order."""
    written = json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(written.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _choice(record: Mapping[str, Any], where: str) -> ChoiceItem:
    choices, answer = _texts(record, "choices", where), record.get("answer")
    if len(choices) < 2 or "" in choices:
        raise DataError(f"{where}: choices: at least two texts that are not empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise DataError(
            f"{where}: answer: got {answer!r}; allowed: the number of the right choice, 0 to {len(choices) - 1}"
        )
    return ChoiceItem(_text(record, "prompt", where), choices, answer)


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key}: got {_shown(value)}; allowed: a text")
    return value


def _texts(record: Mapping[str, Any], key: str, where: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    value = record.get(key, default)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not all(isinstance(one, str) for one in listed):
        raise DataError(f"{where}: {key}: got {_shown(value)}; allowed: a text, or a list of texts")
    if not listed and default is None:
        raise DataError(f"{where}: {key}: got an empty list")
    return tuple(listed)


def _shown(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    file = SourceFile(path, "jsonl", name=str(path), compression="gzip" if path.suffix == ".gz" else "")
    before = 0
    for block in blocks(file):
        for record in records_of(block):
            if record.problem is not None:
                raise DataError(f"{path}:{before + record.line}: {record.problem.reason}")
            yield record.value or {}
        before += lines_in(block)


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
        if (own := self.answer_scorer) is None:
            right = [{text.strip() for text in item.answers} for item in items]
            return [{"exact_match": float(said.strip() in texts)} for said, texts in zip(answers, right, strict=True)]
        file, marks = source_file(getattr(own, "func", own)), []  # options are bound by a partial
        for record, answer in zip(self.items.records, answers, strict=True):
            with naming(f"the scorer of eval.tasks {self.name}", file, (PluginError,)):
                marks.append(_numbers(own(answer, dict(record)), self.name))
        return marks


def _chosen(item: ChoiceItem, said: Sequence[Likelihood]) -> dict[str, Any]:
    """The result of an item: of equally likely choices the first one is chosen."""
    nats = np.array([one.log_likelihood for one in said])
    letters = np.array([len(choice) for choice in item.choices])
    picked, by_letter = int(np.argmax(nats)), int(np.argmax(nats / letters))
    right = item.choices[item.answer].encode("utf-8", "replace")
    figures = {
        "acc": float(picked == item.answer), "acc_norm": float(by_letter == item.answer),
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
