"""One message of a conversation, in the several ways of writing it, as chat templates take it.

A message becomes `role`, `content` (a string), and where there are any `reasoning_content` and `tool_calls`, whose
arguments are objects where they parse to one; keys that are not ours are kept. `train` is the user's own wish.
"""

from typing import Any

from tuner.data.reading.jsonl import strict_json
from tuner.data.reading.problems import KeyPath, RowProblem, quoted

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
"""ShareGPT's names of who speaks, and our roles."""
_OTHER_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning", "thinking")
_MEDIA_WORDS = ("image", "audio", "video")
_WISHES = ("train", "loss_weight", "weight")
_TYPES = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}


def message_of(value: Any, path: KeyPath) -> Message:
    """Return a message of `role` and `content` in our form. RowProblem."""
    if not isinstance(value, dict):
        raise RowProblem(f"a message is an object, got {type_name(value)}", path=path)
    message = {key: item for key, item in value.items() if item is not None and key not in _WISHES}
    role = message.get("role")
    role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RowProblem(f"unknown role {_shown(role)}; known: {', '.join(ROLES)}", path=(*path, "role"))
    message["role"] = role
    calls = _calls(message.pop("tool_calls", None), (*path, "tool_calls"))
    content = value.get("content")
    if isinstance(content, list):
        _add_parts(message, content, calls, (*path, "content"))
    elif content is None and calls:
        message["content"] = ""
    else:
        message["content"] = check_string(content, (*path, "content"))
    if calls:
        if role != "assistant":
            raise RowProblem(f"tool_calls in a message of {role}", path=(*path, "tool_calls"))
        message["tool_calls"] = calls
    return _with_wish(message, value, path)


def turn_of(value: dict[str, Any], path: KeyPath) -> Message:
    """Return a ShareGPT turn of `from` and `value` in our form. RowProblem."""
    speaker = value["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RowProblem(f"unknown speaker {_shown(speaker)}; known: {', '.join(SPEAKERS)}", path=(*path, "from"))
    text = check_string(value.get("value"), (*path, "value"))
    if speaker != "function_call":
        return _with_wish(said_by(role, text), value, path)
    calls = _parsed(text, (*path, "value"))
    calls = calls if isinstance(calls, list) else [calls]
    message = said_by(role, "") | {"tool_calls": [_call(call, (*path, "value")) for call in calls]}
    return _with_wish(message, value, path)


def said_by(role: str, content: str) -> Message:
    """Return a plain message."""
    return {"role": role, "content": content}


def check_string(value: Any, path: KeyPath) -> str:
    """Return a string. RowProblem."""
    if not isinstance(value, str):
        raise RowProblem(f"{_last_key(path)} is a string, got {type_name(value)}", path=path)
    return value


def check_text(value: Any, path: KeyPath) -> str:
    """Return a string that is not empty. RowProblem."""
    text = check_string(value, path)
    if not text:
        raise RowProblem(f"{path[-1]} is empty", path=path)
    return text


def type_name(value: Any) -> str:
    """What a JSON value is, in words."""
    return _TYPES.get(type(value), "a list" if isinstance(value, list) else "an object")


def _last_key(path: KeyPath) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "it")


def _shown(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else type_name(value)


def _with_wish(message: Message, value: dict[str, Any], path: KeyPath) -> Message:
    """Add `train` from any of the three ways of wishing it."""
    wishes = {name: value[name] for name in _WISHES if value.get(name) is not None}
    for name, wish in wishes.items():
        if name == "train" and not isinstance(wish, bool):
            raise RowProblem(f"train is true or false, got {type_name(wish)}", path=(*path, name))
        if not isinstance(wish, (bool, int, float)) or wish not in (0, 1):
            raise RowProblem(f"{name} is 0 or 1: a message is trained or not", path=(*path, name))
        if message.setdefault("train", bool(wish)) != bool(wish):
            raise RowProblem(f"{' and '.join(wishes)} contradict each other", path=(*path, name))
    return message


def _add_parts(message: Message, parts: list[Any], calls: list[Message], path: KeyPath) -> None:
    """Add the content and reasoning of a list of parts to `message`, and its tool calls to `calls`."""
    texts, thoughts = [], []
    for i, part in enumerate(parts):
        here = (*path, i)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(_part_text(part, ("text", "value"), here))
        elif kind in _REASONING:
            thoughts.append(_part_text(part, (kind, "text", "value"), here))
        elif kind == "tool_call":
            call = next((part[key] for key in ("value", "tool_call") if part.get(key) is not None), part)
            calls.append(_call(_parsed(call, here) if isinstance(call, str) else call, here))
        elif isinstance(kind, str) and any(word in kind for word in _MEDIA_WORDS):
            raise RowProblem(f"only text parts can be trained, got {_shown(kind)}", path=here)
        else:
            raise RowProblem("only text parts can be trained: {type: text, text: ...}", path=here)
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)


def _part_text(part: dict[str, Any], keys: tuple[str, ...], path: KeyPath) -> str:
    key = next((key for key in keys if part.get(key) is not None), keys[0])
    return check_string(part.get(key), (*path, key))


def _calls(value: Any, path: KeyPath) -> list[Message]:
    if isinstance(value, str):
        value = _parsed(value, path)
    if not isinstance(value, list | None):
        raise RowProblem(f"tool_calls is a list, got {type_name(value)}", path=path)
    return [_call(call, (*path, i)) for i, call in enumerate(value or [])]


def _call(value: Any, path: KeyPath) -> Message:
    """A tool call as OpenAI writes it, from that or from a bare {name, arguments}."""
    if not isinstance(value, dict):
        raise RowProblem(f"a tool call is an object, got {type_name(value)}", path=path)
    wrapped = isinstance(value.get("function"), dict)
    function = dict(value["function"] if wrapped else value)
    if not wrapped:
        function.pop("type", None)
    if not isinstance(function.get("name"), str):
        raise RowProblem("a tool call has a name", path=path)
    arguments = function.get("arguments", function.pop("parameters", None))
    if arguments is None:
        arguments = {}
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    elif not isinstance(arguments, dict):
        raise RowProblem(f"arguments is an object or JSON text, got {type_name(arguments)}", path=path)
    function["arguments"] = arguments
    rest = {key: item for key, item in value.items() if item is not None} if wrapped else {}
    return rest | {"type": "function", "function": function}


def _object_in(text: str) -> Any:
    """The object that a text is JSON for, or the text itself."""
    try:
        value = strict_json(text)
    except RowProblem:
        return text
    return value if isinstance(value, dict) else text


def _parsed(text: str, path: KeyPath) -> Any:
    try:
        return strict_json(text)
    except RowProblem as problem:
        raise RowProblem(f"{_last_key(path)}: {problem.reason}", path=path) from problem
