"""Examples to token ids and loss masks that are proven, row by row.

A trained turn is found by rendering the conversation up to it and up to its end, never by looking for strings: the
two renders must be prefixes of the whole text, no token may straddle either end, and the prompt alone must encode to
the very ids that stand before the answer. A row where this cannot be shown is refused with the reason.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tuner.data.rows import Conversation, Example, PlainText, PromptCompletion
from tuner.data.sources import RowProblem
from tuner.data.tokenizer import Encoded, TextTokenizer
from tuner.errors import DataError

TrainOn = Literal["assistant", "last_assistant", "all"]


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, stop) and why they are trained or not."""

    start: int
    stop: int
    rule: str


@dataclass(frozen=True)
class Document:
    """One encoded example of n tokens."""

    input_ids: npt.NDArray[np.int64]
    """int64[n]"""
    trained: npt.NDArray[np.bool_]
    """bool[n]"""
    prompt_tokens: int
    """Tokens before the last answer, as a model is prompted with them; 0 where there is none."""
    spans: list[TokenSpan]


@dataclass(frozen=True)
class _Turn:
    start: int
    stop: int
    trained: bool
    rule: str
    is_answer: bool


@dataclass(frozen=True)
class _Plan:
    """A text with the characters of its turns; tokens outside of them get `default`."""

    text: str
    turns: list[_Turn] = field(default_factory=list)
    default: bool = False
    default_rule: str = "template"
    frame: bool = False
    """Whether the tokenizer's own tokens around a text and the end token are added."""


class Encoder:
    """Encodes examples for a method; `train_on` is the recipe's, and `all` for pre-training."""

    def __init__(self, tokenizer: TextTokenizer, train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._special = np.array(sorted(tokenizer.special_ids), dtype=np.int64)
        self._tails: dict[str, list[int]] = {}

    def encode(self, examples: Sequence[Example]) -> list[Document | RowProblem]:
        """Encode examples, in order; one that cannot be used gives its RowProblem. DataError without a template."""
        plans: list[_Plan | RowProblem] = []
        for example in examples:
            try:
                plans.append(self._plan(example))
            except RowProblem as problem:
                plans.append(problem)
        encodings = iter(self._tokenizer.encode_batch([plan.text for plan in plans if isinstance(plan, _Plan)]))
        documents: list[Document | RowProblem] = []
        for plan, example in zip(plans, examples, strict=True):
            try:
                documents.append(
                    plan if isinstance(plan, RowProblem) else self._document(plan, example, next(encodings))
                )
            except RowProblem as problem:
                documents.append(problem)
        return documents

    def _plan(self, example: Example) -> _Plan:
        if isinstance(example, PlainText):
            self._refuse_special(example.text, ("text",))
            return _Plan(example.text, default=True, default_rule="text", frame=True)
        if isinstance(example, PromptCompletion):
            self._refuse_special(example.prompt, ("prompt",))
            self._refuse_special(example.completion, ("completion",))
            text, cut = example.prompt + example.completion, len(example.prompt)
            everything = self._train_on == "all"
            turns = [_Turn(0, cut, everything, "prompt", False), _Turn(cut, len(text), True, "completion", True)]
            return _Plan(text, turns, default=everything, default_rule="start of text", frame=True)
        return self._conversation(example)

    def _conversation(self, example: Conversation) -> _Plan:
        template = self._tokenizer.template
        for i, message in enumerate(example.messages):
            for name, value in _strings(message):
                self._refuse_special(value, ("messages", i, name))
        everything = self._train_on == "all"
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        wanted = self._wanted(example, answers)
        try:
            if template.has_generation_marks:
                text, marks = template.render_marked(example.messages, example.tools)
                if len(marks) != len(answers):
                    raise RowProblem("the template marks another number of turns than the assistant has", 1)
            else:
                text, marks = template.render(example.messages, tools=example.tools), []
            spans = dict(zip(answers, marks, strict=False))
            turns = []
            for i, message in enumerate(example.messages):
                if wanted[i] == everything and i not in answers[-1:]:
                    continue  # nothing here differs from the rest
                try:
                    start, stop = spans.get(i) or self._turn(example, i, text)
                except RowProblem:
                    if wanted[i] == everything:
                        continue  # only the held-out sample would use it
                    raise
                rule = f"{message['role']} turn" if example.train[i] is None else f"train: {str(wanted[i]).lower()}"
                turns.append(_Turn(start, stop, wanted[i], rule, i in answers))
        except DataError as error:
            raise RowProblem(error.message, 1) from error
        return _Plan(text, turns, default=everything, default_rule="all" if everything else "template")

    def _wanted(self, example: Conversation, answers: list[int]) -> list[bool]:
        by_rule = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(example.messages))}
        rule = set(by_rule[self._train_on])
        return [i in rule if own is None else own for i, own in enumerate(example.train)]

    def _turn(self, example: Conversation, i: int, text: str) -> tuple[int, int]:
        """Characters [start, stop) that message i adds to the whole text."""
        answer = example.messages[i]["role"] == "assistant"
        before = ""
        if i or answer:
            before = self._tokenizer.render(example.messages[:i], answer, example.tools)
        if not text.startswith(before):
            raise RowProblem(
                f"the template writes the text before message {i} differently when it is a prompt", path=("messages", i)
            )
        through = text
        if i + 1 < len(example.messages):
            through = self._tokenizer.render(example.messages[: i + 1], tools=example.tools)
        if text.startswith(through):
            return len(before), len(through)
        return len(before), self._stop_before_end(through, text, len(before), i)

    def _stop_before_end(self, through: str, text: str, start: int, i: int) -> int:
        # Some templates end a whole conversation with one more control token: all before it must be the same.
        part, whole = self._tokenizer.encode_batch([through, text])
        shared = min(len(part.ids), len(whole.ids))
        same = np.append(part.ids[:shared] == whole.ids[:shared], False)
        first = int(np.argmin(same))
        if (
            first < len(whole.ids)
            and int(whole.starts[first]) > start
            and np.isin(part.ids[first:], self._special).all()
        ):
            return int(whole.starts[first])
        raise RowProblem(f"the template writes message {i} differently when more messages follow", path=("messages", i))

    def _document(self, plan: _Plan, example: Example, encoded: Encoded) -> Document:
        trained = np.full(len(encoded.ids), plan.default, dtype=np.bool_)
        spans: list[TokenSpan] = [TokenSpan(0, len(trained), plan.default_rule)]
        prompt_tokens = 0
        for turn in plan.turns:
            start, stop = _boundary(encoded, turn.start), _boundary(encoded, turn.stop)
            if (
                start is None
                or stop is None
                or (turn.is_answer and not self._prompt_is_exact(plan, encoded, turn, start))
            ):
                if isinstance(example, PromptCompletion):
                    return self._apart(example)
                raise RowProblem(f"a token reaches over an end of the {turn.rule}: its mask cannot be exact", 1)
            if turn.is_answer:
                prompt_tokens = start
                stop = (
                    self._end_of_turn(plan, encoded, turn, start, stop) if turn.trained and not plan.default else stop
                )
            trained[start:stop] = turn.trained
            spans.append(TokenSpan(start, stop, turn.rule))
        document = Document(encoded.ids, trained, prompt_tokens, spans)
        return self._framed(document, plan.default) if plan.frame else document

    def _prompt_is_exact(self, plan: _Plan, encoded: Encoded, turn: _Turn, start: int) -> bool:
        """Whether the text before an answer, encoded alone, gives the ids that stand before it."""
        if start == 0:
            return True
        special = np.flatnonzero(np.isin(encoded.ids[:start], self._special))
        # A control token cuts the text: what follows it is encoded without regard to what precedes.
        first = int(special[-1]) if len(special) else 0
        tail = plan.text[int(encoded.starts[first]) : turn.start]
        ids = self._tails.get(tail)
        if ids is None:
            ids = self._tokenizer.encode(tail)
            if len(self._tails) < 4096 and len(tail) < 256:
                self._tails[tail] = ids
        if np.array_equal(ids, encoded.ids[first:start]):
            return True
        return first > 0 and np.array_equal(self._tokenizer.encode(plan.text[: turn.start]), encoded.ids[:start])

    def _end_of_turn(self, plan: _Plan, encoded: Encoded, turn: _Turn, start: int, stop: int) -> int:
        """The stop after the turn's own end token; white space that the template puts after it is not the model's."""
        special = np.flatnonzero(np.isin(encoded.ids[start:stop], self._special))
        if len(special) == 0:
            return stop
        last = start + int(special[-1])
        return last + 1 if not plan.text[int(encoded.stops[last]) : turn.stop].strip() else stop

    def _apart(self, example: PromptCompletion) -> Document:
        """Encode prompt and completion one by one: the prompt's ids are then those of the prompt alone."""
        prompt, completion = (self._tokenizer.encode(text) for text in (example.prompt, example.completion))
        if self._tokenizer.decode([*prompt, *completion]) != example.prompt + example.completion:
            raise RowProblem(
                "a token reaches over the end of the prompt: its mask cannot be exact", path=("completion",)
            )
        ids, cut = np.array([*prompt, *completion], dtype=np.int64), len(prompt)
        everything = self._train_on == "all"
        spans = [TokenSpan(0, cut, "prompt"), TokenSpan(cut, len(ids), "completion")]
        return self._framed(Document(ids, everything | (np.arange(len(ids)) >= cut), cut, spans), everything)

    def _framed(self, document: Document, train_prefix: bool) -> Document:
        prefix, suffix = self._tokenizer.text_prefix, list(self._tokenizer.text_suffix)
        end = self._tokenizer.eos_id
        if end is not None and end not in suffix:
            suffix.append(end)
        ids = np.concatenate([prefix, document.input_ids, suffix]).astype(np.int64)
        ends = (np.full(len(prefix), train_prefix), np.ones(len(suffix), dtype=np.bool_))
        trained = np.concatenate([ends[0], document.trained, ends[1]]).astype(np.bool_)
        spans = [TokenSpan(0, len(prefix), "start of text")] if prefix else []
        spans += [TokenSpan(s.start + len(prefix), s.stop + len(prefix), s.rule) for s in document.spans]
        spans.append(TokenSpan(len(ids) - len(suffix), len(ids), "end of text"))
        whole = not any(span.rule == "completion" for span in document.spans)
        prompt = len(prefix) + (len(document.input_ids) // 2 if whole else document.prompt_tokens)
        return Document(ids, trained, prompt, spans)

    def _refuse_special(self, text: str, path: tuple[str | int, ...]) -> None:
        found = self._tokenizer.find_special(text)
        if found is not None:
            raise RowProblem(f"the control token {found[0]} is written out in the text", path=path)


def _boundary(encoded: Encoded, char: int) -> int | None:
    """Index of the first token at or after a character, or None where a token straddles it."""
    index = int(np.searchsorted(encoded.starts, char, side="left"))
    return None if index and int(encoded.stops[:index].max()) > char else index


def _strings(message: dict[str, Any]) -> list[tuple[str, str]]:
    """Every value of a message as text; nested ones, such as tool calls, as the JSON that templates write."""
    return [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in message.items()
        if name != "role"
    ]
