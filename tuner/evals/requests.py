"""What is asked of the model, in token ids: the likelihood of a continuation after its context.

IdSource become tokens as lm-evaluation-harness makes them: context and continuation are encoded together and cut where
the context's tokens end, and white space at the end of a context belongs to the continuation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tuner.errors import DataError


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
