"""What a record is an example of: the answers and texts that are learned, before any token.

A table's objects at one place have the same keys, and null stands for what a record did not have. In JSON lines that
were written from one, nulls are values: nobody can tell which of them were meant, and they are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
"""One message of a conversation."""


class Conversation(NamedTuple):
    """Messages for the chat template, each with the user's choice to train it or not, where there is one."""

    messages: list[Message]
    train: list[bool | None]
    tools: list[dict[str, Any]] | None


class PromptCompletion(NamedTuple):
    """A prompt that is given and the completion that is learned."""

    prompt: str
    completion: str


class PlainText(NamedTuple):
    """A document that is learned whole."""

    text: str
    ends: bool = True
    """Whether the end token follows."""


class Tokens(NamedTuple):
    """Token ids made elsewhere; `trained` is one flag a token, or None where the method decides."""

    input_ids: Sequence[int] | npt.NDArray[np.int64]
    trained: list[bool] | None
    place: int | None = None
    """Of an array of ids: where the first one stands in its file."""


Example = Conversation | PromptCompletion | PlainText | Tokens
"""What is learned by itself."""
Answered = Conversation | PromptCompletion
"""A prompt and what answers it."""


class Pair(NamedTuple):
    """Two answers to one prompt, of which the first is preferred; both conversations or both texts."""

    chosen: Answered
    rejected: Answered
    margin: float | None = None
    """By how much it is preferred, where the record says so."""


class Labelled(NamedTuple):
    """An answer that is wanted (true) or not wanted (false)."""

    example: Answered
    label: bool


Compared = Pair | Labelled
"""What is learned about answers by comparing them."""
Learned = Example | Compared
"""What a method makes of a record."""
BY_TYPE = {PlainText: "text", Tokens: "tokens", PromptCompletion: "prompt_completion"}
"""Examples that are of one form of record alone."""
Record = Mapping[str, Any]
NULLS = "null in tools or tool calls: trained as written"


def document_of(example: Example) -> Example:
    """What is learned of an example token by token: a lone message of the assistant, as ms-swift writes it, is text."""
    if isinstance(example, Conversation) and [message["role"] for message in example.messages] == ["assistant"]:
        message = example.messages[0]
        if message.keys() <= {"role", "content"}:
            return PlainText(message["content"])
    return example


def answers_of(example: Learned) -> tuple[Example, ...]:
    """What becomes a document each: both answers of a pair, the chosen one first."""
    if isinstance(example, Pair):
        return example.chosen, example.rejected
    return (example.example,) if isinstance(example, Labelled) else (example,)


def has_null(parts: Sequence[Example]) -> bool:
    """Whether null is the value of a key in the tools or tool calls of what becomes of one record."""
    chats = [example for example in parts if isinstance(example, Conversation)]
    calls = [message.get("tool_calls") for chat in chats for message in chat.messages]
    return _has_null_inside([chat.tools for chat in chats]) or _has_null_inside(calls)


def _has_null_inside(value: Any) -> bool:
    if isinstance(value, dict):
        return None in value.values() or any(map(_has_null_inside, value.values()))
    return isinstance(value, list) and any(map(_has_null_inside, value))
