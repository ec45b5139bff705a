"""What is trained of a chat, derived with transformers alone: renders, ids and character spans; no code of `tuner`.

A model is prompted for an answer with the ids of the messages before it and the generation prompt, and ends it with a
token that is known. Where one text of the whole chat begins with each of these prompts, in characters and in ids, the
chat is that text. Else each answer is a document: the prompt's ids, and what the template writes after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Chat = Sequence[dict[str, Any]]
CALLERS: tuple[dict[str, bool], ...] = ({}, {"enable_thinking": False}, {"enable_thinking": True})
"""What callers may say of thoughts."""


class Document(NamedTuple):
    """Ids, and whether each is trained."""

    ids: list[int]
    trained: list[bool]


class Derivation:
    """Derives the documents of chats for a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, end: str) -> None:
        """`end` is the token that ends an answer."""
        self._tokenizer = tokenizer
        self._end = end

    def matched(self, chat: Chat, documents: Sequence[Document], at: int) -> tuple[int, int] | None:
        """How many of the documents from `at` are those of a chat, and how many answers have none; None: another."""
        if documents[at : at + 1] == [self.whole(chat)]:
            return 1, 0
        taken = left = 0
        for candidates in self.by_answer(chat):
            is_next = documents[at + taken : at + taken + 1]
            found = bool(is_next) and is_next[0] in candidates
            taken, left = taken + found, left + (not found)
        return (taken, left) if taken else None

    def whole(self, chat: Chat) -> Document | None:
        """The chat as one text with all its answers trained; None where an answer does not follow its prompt."""
        text = self._render(chat)
        encoding = self._encode(text)
        trained = [False] * len(encoding.ids)
        for i in _answers(chat):
            prompt = self._render(chat[:i], True)
            stop = self._stop(text, len(prompt))
            given = self._encode(prompt).ids
            if not text.startswith(prompt) or stop is None or encoding.ids[: len(given)] != given:
                return None
            inside = encoding.within(len(prompt), stop)
            if inside is None or inside.start != len(given):
                return None
            trained[inside.start : inside.stop] = [True] * len(inside)
        return Document(encoding.ids, trained)

    def by_answer(self, chat: Chat) -> Iterator[list[Document]]:
        """For each answer the documents that it may be, one for each thing a caller may say of thoughts."""
        for i in _answers(chat):
            found = (self._answer(chat[: i + 1], said) for said in CALLERS)
            yield [document for document in found if document is not None]

    def _answer(self, chat: Chat, said: dict[str, bool]) -> Document | None:
        prompt, text = self._render(chat[:-1], True, **said), self._render(chat)
        stop = self._stop(text, len(prompt))
        if not text.startswith(prompt) or stop is None:
            return None
        given, encoding = self._encode(prompt).ids, self._encode(text)
        inside = encoding.within(len(prompt), stop)
        ids = encoding.ids
        if ids[: len(given)] != given or inside is None or inside.start != len(given):
            # A token of both would reach over the prompt's end: a model continues after the prompt's own ids.
            rest = self._encode(text[len(prompt) :])
            inside = rest.within(0, stop - len(prompt))
            ids = [*given, *rest.ids]
            if inside is None or self._tokenizer.decode(ids, skip_special_tokens=False) != text:
                return None
            inside = range(len(given), inside.stop + len(given))
        return Document(ids, [k in inside for k in range(len(ids))])

    def _stop(self, text: str, start: int) -> int | None:
        """Where the first end token after a character ends."""
        found = text.find(self._end, start)
        return None if found < 0 else found + len(self._end)

    def _render(self, chat: Chat, prompt: bool = False, **said: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **said)
            if chat
            else ""
        )

    def _encode(self, text: str) -> _Encoding:
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _Encoding(text, list(found["input_ids"]), list(found["offset_mapping"]))


class _Encoding(NamedTuple):
    text: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def within(self, start: int, stop: int) -> range | None:
        """The tokens of these characters; None where one reaches over either end, white space after it left aside."""
        found = [k for k, (first, after) in enumerate(self.spans) if first < stop and after > start]
        if not found or self.spans[found[0]][0] < start:
            return None
        over = self.text[stop : self.spans[found[-1]][1]]
        return None if over.strip() or found != list(range(found[0], found[-1] + 1)) else range(found[0], found[-1] + 1)


def _answers(chat: Chat) -> list[int]:
    return [i for i, message in enumerate(chat) if message["role"] == "assistant"]
