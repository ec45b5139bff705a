"""What a record is an example of: the answers and texts that are learned, before any token."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Tokens(NamedTuple):
    """Token ids made elsewhere; `trained` is one flag a token, or None where the method decides."""

    input_ids: list[int]
    trained: list[bool] | None


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
Record = Mapping[str, Any]
