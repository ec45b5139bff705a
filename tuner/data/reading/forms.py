"""The forms of records, one parser each: what every key of a form may hold."""

from collections.abc import Callable
from typing import Any

from tuner.data.reading.examples import Conversation, Example, PlainText, PromptCompletion, Record, Tokens
from tuner.data.reading.jsonl import strict_json
from tuner.data.reading.messages import Message, check_string, check_text, message_of, said_by, turn_of, type_name
from tuner.data.reading.problems import RecordProblem

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
        has_role = isinstance(item, dict) and item.get("role") is not None
        if isinstance(item, dict) and item.get("from") is not None and not has_role:
            turns.append(turn_of(item, (key, i)))
        elif key == "conversations" and isinstance(item, dict) and not has_role:
            raise RecordProblem("a turn has from and value", path=(key, i))
        else:
            turns.append(message_of(item, (key, i), by_speaker))
    return turns


def from_sharegpt(value: Record) -> Example:
    """The form where the recipe names it: what a speaker may be called, a role may be called too."""
    return conversation(value, turns_of(value, "conversations", by_speaker=True), system=True)


def _from_alpaca(value: Record) -> Example:
    question = alpaca_question(value)
    answer = check_text(value["output"], ("output",))
    return conversation(value, [*question, said_by("assistant", answer)], system=True)


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


def conversation(value: Record, messages: list[Message], system: bool = False) -> Conversation:
    """A conversation with the record's tools and, where its form has one, the record's system prompt."""
    if system and value.get("system"):
        if messages[0]["role"] == "system":
            raise RecordProblem("a system prompt both in the row and as its first turn", path=("system",))
        messages = [said_by("system", check_string(value["system"], ("system",))), *messages]
    train = [message.pop("train", None) for message in messages]
    return Conversation(messages, train, _tools(value))


def _tools(value: Record) -> list[dict[str, Any]] | None:
    if not value.get("tools"):
        return None
    tools = listed(value, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordProblem("tools is a list of objects", path=("tools",))
    return tools or None


def _from_prompt(value: Record) -> Example:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [{"train": False, **message} for message in turns_of(value, "prompt")]
        return conversation(value, given + turns_of(value, "completion"))
    return PromptCompletion(check_string(prompt, ("prompt",)), check_text(completion, ("completion",)))


def _from_tokens(value: Record) -> Example:
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
ALSO_READ = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("tools",),
    "alpaca": ("input", "history", "system", "tools"),
}
"""What a form may read apart from the keys that it needs."""
FORMS: dict[str, tuple[tuple[str, ...], Callable[[Record], Example]]] = {
    "messages": (("messages",), lambda value: conversation(value, turns_of(value, "messages"))),
    "sharegpt": (
        ("conversations",),
        lambda value: conversation(value, turns_of(value, "conversations"), system=True),
    ),
    "prompt_completion": (("prompt", "completion"), _from_prompt),
    "alpaca": (("instruction", "output"), _from_alpaca),
    "text": (("text",), lambda value: PlainText(check_text(value["text"], ("text",)))),
    "tokens": (("input_ids",), _from_tokens),
}
