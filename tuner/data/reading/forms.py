"""The forms of records, one parser each: what every key of a form may hold."""

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.data.reading.examples import Conversation, Example, Message, PlainText, Record, Tokens
from tuner.data.reading.jsonl import strict_json
from tuner.data.reading.problems import KeyPath, RecordProblem, quoted

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
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_MEDIA_KEYS = frozenset(MEDIA)
NO_MEDIA = "images, audio and video cannot be trained"
_TRAIN_KEYS = ("train", "loss_weight", "weight", "loss")
_FLAGS = frozenset(_TRAIN_KEYS)
_TYPES = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a string"}


def message_of(value: Any, path: KeyPath, by_speaker: bool = False) -> Message:
    """Return a message of `role` and `content` in our form; `by_speaker` takes ShareGPT's names too. RecordProblem."""
    if not isinstance(value, dict):
        raise RecordProblem(f"a message is an object, got {type_name(value)}", path=path)
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if len(message) == 2 and type(message.get("content")) is str and role in ROLES:
        return message  # most are so, and each of millions would be asked for all that it does not have
    for key in _TRAIN_KEYS:
        message.pop(key, None)
    role = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
    if by_speaker and isinstance(role, str):
        role = SPEAKERS.get(role, role)
    if role not in ROLES:
        raise RecordProblem(f"unknown role {_shown(role)}; known: {', '.join(ROLES)}", path=(*path, "role"))
    message["role"] = role
    refuse_media(message, path)
    calls = _calls(message.pop("tool_calls", None), (*path, "tool_calls"))
    content = value.get("content")
    if isinstance(content, list) and (content or not calls):
        _add_parts(message, content, calls, (*path, "content"))
    elif calls and content in (None, []):
        message["content"] = ""
    else:
        message["content"] = check_string(content, (*path, "content"))
    if calls:
        if role != "assistant":
            raise RecordProblem(f"tool_calls in a message of {role}", path=(*path, "tool_calls"))
        message["tool_calls"] = calls
    return _with_train_flag(message, value, path)


def refuse_media(value: Mapping[str, Any], path: KeyPath = ()) -> None:
    """Refuse what has images, audio or video. RecordProblem."""
    for key in MEDIA if not _MEDIA_KEYS.isdisjoint(value) else ():
        if value.get(key):
            raise RecordProblem(NO_MEDIA, path=(*path, key))


def turn_of(value: dict[str, Any], path: KeyPath) -> Message:
    """Return a ShareGPT turn of `from` and `value` in our form. RecordProblem."""
    speaker = value["from"]
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise RecordProblem(f"unknown speaker {_shown(speaker)}; known: {', '.join(SPEAKERS)}", path=(*path, "from"))
    text = check_string(value.get("value"), (*path, "value"))
    if speaker != "function_call":
        return _with_train_flag(said_by(role, text), value, path)
    calls = _parsed(text, (*path, "value"))
    calls = calls if isinstance(calls, list) else [calls]
    message = said_by(role, "") | {"tool_calls": [_call(call, (*path, "value")) for call in calls]}
    return _with_train_flag(message, value, path)


def said_by(role: str, content: str) -> Message:
    """Return a plain message."""
    return {"role": role, "content": content}


def is_silent(message: Message) -> bool:
    """Whether a message has no word, no thought and no tool call."""
    content = message["content"]
    has_words = content and not content.isspace()
    return not (has_words or message.get("tool_calls") or message.get("reasoning_content"))


def check_string(value: Any, path: KeyPath) -> str:
    """Return a string. RecordProblem."""
    if not isinstance(value, str):
        raise RecordProblem(f"{_last_key(path)} is a string, got {type_name(value)}", path=path)
    return value


def check_text(value: Any, path: KeyPath) -> str:
    """Return a string that is not blank. RecordProblem."""
    text = check_string(value, path)
    if not text or text.isspace():
        raise RecordProblem(f"{path[-1]} is empty", path=path)
    return text


def type_name(value: Any) -> str:
    """What a JSON value is, in words."""
    return _TYPES.get(type(value), "a list" if isinstance(value, list) else "an object")


def _last_key(path: KeyPath) -> str:
    return next((part for part in reversed(path) if isinstance(part, str)), "it")


def _shown(value: Any) -> str:
    return quoted(value) if isinstance(value, str) else type_name(value)


def _with_train_flag(message: Message, value: dict[str, Any], path: KeyPath) -> Message:
    """Add `train` from any of the three ways of writing it."""
    if _FLAGS.isdisjoint(value):
        return message
    flags = {name: value[name] for name in _TRAIN_KEYS if value.get(name) is not None}
    for name, flag in flags.items():
        if name == "train" and not isinstance(flag, bool):
            raise RecordProblem(f"train is true or false, got {type_name(flag)}", path=(*path, name))
        if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
            raise RecordProblem(f"{name} is 0 or 1: a message is trained or not", path=(*path, name))
        if message.setdefault("train", bool(flag)) != bool(flag):
            raise RecordProblem(f"{' and '.join(flags)} contradict each other", path=(*path, name))
    return message


def _add_parts(message: Message, parts: list[Any], calls: list[Message], path: KeyPath) -> None:
    """Add the content and reasoning of a list of parts to `message`, and its tool calls to `calls`."""
    if not parts:
        raise RecordProblem("content is empty: it has no part", path=path)
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
            raise RecordProblem(f"only text parts can be trained, got {_shown(kind)}", path=here)
        else:
            raise RecordProblem("only text parts can be trained: {type: text, text: ...}", path=here)
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
        raise RecordProblem(f"tool_calls is a list, got {type_name(value)}", path=path)
    return [_call(call, (*path, i)) for i, call in enumerate(value or [])]


def _call(value: Any, path: KeyPath) -> Message:
    """A tool call as OpenAI writes it, from that or from a bare {name, arguments}."""
    if not isinstance(value, dict):
        raise RecordProblem(f"a tool call is an object, got {type_name(value)}", path=path)
    wrapped = isinstance(value.get("function"), dict)
    function = dict(value["function"] if wrapped else value)
    if not wrapped:
        function.pop("type", None)
    if not isinstance(function.get("name"), str):
        raise RecordProblem("a tool call has a name", path=path)
    given = function.get("arguments"), function.pop("parameters", None)
    arguments: Any = next((item for item in given if item is not None), {})
    if isinstance(arguments, str):
        arguments = _object_in(arguments)
    elif not isinstance(arguments, dict):
        raise RecordProblem(f"arguments is an object or JSON text, got {type_name(arguments)}", path=path)
    function["arguments"] = arguments
    rest = {key: item for key, item in value.items() if item is not None} if wrapped else {}
    return rest | {"type": "function", "function": function}


def _object_in(text: str) -> Any:
    """The object that a text is JSON for, or the text itself."""
    try:
        value = strict_json(text)
    except RecordProblem:
        return text
    return value if isinstance(value, dict) else text


def _parsed(text: str, path: KeyPath) -> Any:
    try:
        return strict_json(text)
    except RecordProblem as problem:
        raise RecordProblem(f"{_last_key(path)}: {problem.reason}", path=path) from problem


NOT_TRAINED = -100
"""The label of a token that is not trained."""
_MAX_ID = 2**32 - 1


def listed(value: Record, key: str) -> Any:
    """The value at a key; a list written as JSON text, as a CSV file has to, is read. RecordProblem."""
    item = value[key]
    return _parsed(item, (key,)) if isinstance(item, str) and item.lstrip()[:1] == "[" else item


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
        has_no_role = isinstance(item, dict) and item.get("role") is None
        if has_no_role and item.get("from") is not None:
            turns.append(turn_of(item, (key, i)))
        elif has_no_role and key == "conversations":
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
    return conversation(value, [*question, said_by("assistant", check_text(value["output"], ("output",)))])


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
