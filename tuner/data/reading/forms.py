"""The forms of records, one parser each: what every key of a form may hold."""

from collections.abc import Sequence
from typing import Any

from tuner.data.reading.examples import Conversation, Example, PlainText, Record, Tokens
from tuner.data.reading.jsonl import strict_json
from tuner.data.reading.messages import (
    SPEAKERS,
    Message,
    check_string,
    check_text,
    is_silent,
    message_of,
    said_by,
    turn_of,
    type_name,
)
from tuner.data.reading.problems import KeyPath, RecordProblem

NOT_TRAINED = -100
"""The label of a token that is not trained."""
_MAX_ID = 2**32 - 1


def listed(value: Record, key: str) -> Any:
    """The value at a key; a list written as JSON text, as a CSV file has to, is read. RecordProblem."""
    item = value[key]
    if isinstance(item, str) and item.lstrip()[:1] == "[":
        try:
            return strict_json(item)
        except RecordProblem as problem:
            raise RecordProblem(f"{key}: {problem.reason}", path=(key,)) from problem
    return item


def items_of(value: Record, key: str) -> list[Any]:
    """The list at a key, which is not empty. RecordProblem."""
    items = listed(value, key)
    if not isinstance(items, list):
        raise RecordProblem(f"{key} is a list, got {type_name(items)}", path=(key,))
    if not items:
        raise RecordProblem(f"{key} is empty", path=(key,))
    return items


def turns_of(value: Record, key: str, by_speaker: bool = False) -> list[Message]:
    """Messages of `role` and `content`, or turns of `from` and `value`: each item says by its keys which.

    With `by_speaker` a role may have any of ShareGPT's names, such as human.
    """
    turns = []
    for i, item in enumerate(items_of(value, key)):
        if not isinstance(item, dict) or item.get("role") is not None:
            turns.append(message_of(item, (key, i), by_speaker))
        elif item.get("from") is not None:
            turns.append(turn_of(item, (key, i)))
        elif key == "conversations":
            raise RecordProblem("a turn has from and value", path=(key, i))
        else:
            turns.append(message_of(item, (key, i), by_speaker))
    return turns


def from_turns(value: Record, key: str = "conversations", by_speaker: bool = False) -> Example:
    """The conversation at a key; `by_speaker` as for `turns_of`. RecordProblem."""
    turns = turns_of(value, key, by_speaker)
    refuse_empty(turns, (key,))
    return conversation(value, turns)


def refuse_empty(turns: Sequence[Message], path: KeyPath) -> None:
    """Refuse an answer without a word and a tool call, of which only the end would be learned. RecordProblem."""
    for i, message in enumerate(turns):
        if message["role"] == "assistant" and message.get("train") is not False and is_silent(message):
            raise RecordProblem("an answer is empty: no word and no tool call", path=(*path, i))


def from_alpaca(value: Record) -> Example:
    """A question of instruction and input, with its answer. RecordProblem."""
    question = alpaca_question(value)
    for i, message in enumerate(question[:-1]):
        if is_silent(message) and message["role"] == "assistant":
            raise RecordProblem("an answer is empty: no word and no tool call", path=("history", i // 2, 1))
    answer = check_text(value["output"], ("output",))
    return conversation(value, [*question, said_by("assistant", answer)])


def from_text(value: Record) -> Example:
    """A document. RecordProblem: one message of a conversation is none."""
    role = value.get("role")
    if isinstance(role, str) and role.lower() in (*SPEAKERS, "prompter"):
        raise RecordProblem(f"text is what {role} says: one message of a conversation is no document", path=("role",))
    return PlainText(check_text(value["text"], ("text",)))


def alpaca_question(value: Record) -> list[Message]:
    """History and question; instruction and input are joined by a line break, as LLaMA-Factory does. RecordProblem."""
    messages = []
    history = listed(value, "history") if value.get("history") else []
    if not isinstance(history, list):
        raise RecordProblem(f"history is a list, got {type_name(history)}", path=("history",))
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RecordProblem("history is a list of [question, answer]", path=("history", i))
        for j, role in enumerate(("user", "assistant")):
            messages.append(said_by(role, check_string(pair[j], ("history", i, j))))
    parts = [check_string(value["instruction"], ("instruction",))]
    if value.get("input") is not None:
        parts.append(check_string(value["input"], ("input",)))
    question = "\n".join(filter(None, parts))
    if not question:
        raise RecordProblem("instruction is empty", path=("instruction",))
    return [*messages, said_by("user", question)]


def conversation(value: Record, messages: list[Message]) -> Conversation:
    """A conversation with the record's tools and its system prompt, where it has one. RecordProblem."""
    if value.get("system"):
        system = check_string(value["system"], ("system",))
        if messages[0]["role"] != "system":
            messages = [said_by("system", system), *messages]
        elif messages[0]["content"] != system:
            raise RecordProblem("a system prompt both in the row and as its first turn", path=("system",))
    train = [message.pop("train", None) for message in messages]
    return Conversation(messages, train, _tools(value))


def _tools(value: Record) -> list[dict[str, Any]] | None:
    if not value.get("tools"):
        return None
    tools = listed(value, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordProblem("tools is a list of objects", path=("tools",))
    return tools or None


def from_tokens(value: Record) -> Example:
    """Token ids and what says which of them are trained. RecordProblem."""
    ids = _whole_numbers(value, "input_ids", 0, _MAX_ID)
    if value.get("attention_mask") is not None and not all(_flags(value, "attention_mask", len(ids))):
        raise RecordProblem("padding in input_ids: attention_mask is not all 1", path=("attention_mask",))
    masks = {key: _flags(value, key, len(ids)) for key in _MASKS if value.get(key) is not None}
    if value.get("labels") is not None:
        masks["labels"] = _from_labels(value, ids)
    if any(mask != next(iter(masks.values())) for mask in masks.values()):
        raise RecordProblem(f"{' and '.join(masks)} train different tokens", path=(next(iter(masks)),))
    return Tokens(ids, next(iter(masks.values()), None))


def _from_labels(value: Record, ids: list[int]) -> list[bool]:
    labels = _whole_numbers(value, "labels", NOT_TRAINED, _MAX_ID)
    _check_length(labels, "labels", len(ids))
    for i, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (NOT_TRAINED, token):
            reason = f"a label is its token's id or {NOT_TRAINED}; labels are not shifted"
            raise RecordProblem(reason, path=("labels", i))
    return [label != NOT_TRAINED for label in labels]


def _whole_numbers(value: Record, key: str, least: int, most: int) -> list[int]:
    items = items_of(value, key)
    if set(map(type, items)) != {int} or min(items) < least or max(items) > most:
        wrong = next(i for i, item in enumerate(items) if type(item) is not int or not least <= item <= most)
        raise RecordProblem(f"{key} is a list of token ids", path=(key, wrong))
    return items


def _flags(value: Record, key: str, length: int) -> list[bool]:
    items = items_of(value, key)
    wrong = next((i for i, item in enumerate(items) if type(item) not in (int, bool) or item not in (0, 1)), None)
    if wrong is not None:
        raise RecordProblem(f"{key} is a list of 0 and 1", path=(key, wrong))
    _check_length(items, key, length)
    return [bool(item) for item in items]


def _check_length(items: list[Any], key: str, length: int) -> None:
    if len(items) != length:
        raise RecordProblem(f"{key} has {len(items)} entries for {length} tokens", path=(key,))


_MASKS = ("loss_mask", "trained", "assistant_masks", "completion_mask")
