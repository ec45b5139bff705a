"""Raw rows to examples: messages, prompt and completion, or text, each value checked."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from tuner.data.problems import KeyPath, RowProblem

ROLES = ("system", "user", "assistant", "tool")
_KEYS = {"messages": ("messages",), "prompt_completion": ("prompt", "completion"), "text": ("text",)}


class Conversation(NamedTuple):
    """Messages for the chat template, each with the user's own wish to train it or not."""

    messages: list[dict[str, Any]]
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


def parse_row(value: Mapping[str, Any], format: str = "auto") -> Example:  # noqa: A002 (the recipe's word)
    """Return the example in a row; `format` other than auto forces its form. Raises RowProblem."""
    kinds = _KEYS if format == "auto" else {format: _KEYS[format]}
    for kind, keys in kinds.items():
        if all(key in value for key in keys):
            if kind == "messages":
                return _conversation(_messages(value["messages"], ("messages",)), value)
            if kind == "text":
                return PlainText(_text(value["text"], ("text",)))
            return _prompt_completion(value)
    wanted = " or ".join(" + ".join(keys) for keys in kinds.values())
    known = [key for keys in kinds.values() for key in keys]
    matches = {key: get_close_matches(key, known, 1, 0.7) for key in value}
    near = [f"{key!r} (did you mean {match[0]!r}?)" for key, match in matches.items() if match]
    names = ", ".join(near or [repr(key) for key in list(value)[:8]]) or "no keys"
    raise RowProblem(f"no {wanted}; the row has {names}", 1)


def _prompt_completion(value: Mapping[str, Any]) -> Example:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [{"train": False, **m} for m in _messages(prompt, ("prompt",))]
        return _conversation(given + _messages(completion, ("completion",)), value)
    return PromptCompletion(_string(prompt, ("prompt",)), _text(completion, ("completion",)))


def _conversation(messages: list[dict[str, Any]], row: Mapping[str, Any]) -> Conversation:
    tools = row.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowProblem("tools is a list of objects", path=("tools",))
    train = [message.pop("train", None) for message in messages]
    return Conversation(messages, train, tools or None)


def _messages(value: Any, path: KeyPath) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RowProblem(f"{path[0]} is a list, got {_kind(value)}", path=path)
    if not value:
        raise RowProblem(f"{path[0]} is empty", path=path)
    return [_message(message, (*path, i)) for i, message in enumerate(value)]


def _message(value: Any, path: KeyPath) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowProblem(f"a message is an object, got {_kind(value)}", path=path)
    role = value.get("role")
    if role not in ROLES:
        raise RowProblem(f"unknown role {role!r}; known: {', '.join(ROLES)}", path=(*path, "role"))
    if not isinstance(value.get("train"), bool | None):
        raise RowProblem(f"train is true or false, got {_kind(value['train'])}", path=(*path, "train"))
    content = value.get("content")
    if content is None and value.get("tool_calls"):
        return {**value, "content": ""}
    if isinstance(content, list):
        parts = [_part(part, (*path, "content", i)) for i, part in enumerate(content)]
        return {**value, "content": "".join(parts)}
    return {**value, "content": _string(content, (*path, "content"))}


def _part(value: Any, path: KeyPath) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise RowProblem("only text parts can be trained: {type: text, text: ...}", path=path)
    return _string(value.get("text"), (*path, "text"))


def _text(value: Any, path: KeyPath) -> str:
    text = _string(value, path)
    if not text:
        raise RowProblem(f"{path[-1]} is empty", path=path)
    return text


def _string(value: Any, path: KeyPath) -> str:
    if not isinstance(value, str):
        raise RowProblem(f"{path[-1]} is a string, got {_kind(value)}", path=path)
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
