"""What a record is an example of: the answers and texts that are learned, before any token.

A table's objects at one place have the same keys, and null stands for what a record did not have. In JSON lines that
were written from one, nulls are values: where the objects of many records are so, whoever wrote them may not have meant
the nulls; but nobody can tell, and they are kept.
"""

from collections.abc import Iterator, Mapping, Sequence
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
PADDED = "nulls as a table fills them in, in tools or tool calls: trained as written"
_Keys = tuple[str, ...]


class _Objects:
    """What the objects at one place have in common."""

    def __init__(self) -> None:
        self.keys: frozenset[str] | None = None
        self.are_alike = True
        self.null: set[str] = set()
        self.filled: set[str] = set()
        self.records: set[int] = set()
        """Those with a null here."""

    def add(self, record: int, value: dict[str, Any]) -> None:
        keys = frozenset(value)
        self.are_alike &= self.keys in {None, keys}
        self.keys = keys
        null = {key for key, item in value.items() if item is None}
        self.filled |= keys - null
        if null:
            self.null |= null
            self.records.add(record)

    @property
    def is_padded(self) -> bool:
        return self.are_alike and not self.null.isdisjoint(self.filled)


def padded_records(examples: Sequence[Sequence[Example]]) -> int:
    """How many have null for a key of tools or tool calls that others fill, where all objects there have equal keys.

    An example is what becomes of one record: several where it has several answers.
    """
    places: dict[_Keys, _Objects] = {}
    for record, parts in enumerate(examples):
        for place, value in _tools_and_calls(parts):
            places.setdefault(place, _Objects()).add(record, value)
    return len(set().union(*(objects.records for objects in places.values() if objects.is_padded)))


def has_null(parts: Sequence[Example]) -> bool:
    """Whether null is the value of a key in the tools or tool calls of what becomes of one record."""
    return any(None in value.values() for _, value in _tools_and_calls(parts))


def _tools_and_calls(parts: Sequence[Example]) -> Iterator[tuple[_Keys, dict[str, Any]]]:
    """The objects in what becomes of one record, each with the keys that lead to it."""
    for example in parts:
        if isinstance(example, Conversation):
            yield from _objects(example.tools, ("tools",))
            for message in example.messages:
                if "tool_calls" in message:
                    yield from _objects(message["tool_calls"], ("calls",))


def _objects(value: Any, place: _Keys) -> Iterator[tuple[_Keys, dict[str, Any]]]:
    """The objects in a value, each with the keys that lead to it."""
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, place)
    elif isinstance(value, dict):
        yield place, value
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                yield from _objects(item, (*place, key))
