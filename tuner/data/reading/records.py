"""Records to examples: which form a record has, and each of its values checked.

A form is told from the keys of each record, in the order of `_FORMS`, unless the recipe names one. A key whose value is
null counts as absent: tables fill with null what a record does not have.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from tuner.data.reading.columns import COLUMNS_FORM, columns_line, proposed_columns
from tuner.data.reading.jsonl import strict_json
from tuner.data.reading.messages import (
    ROLES,
    SPEAKERS,
    Message,
    check_string,
    check_text,
    message_of,
    said_by,
    turn_of,
    type_name,
)
from tuner.data.reading.problems import RecordProblem, quoted

__all__ = ["ROLES", "SPEAKERS", "Conversation", "Example", "PlainText", "PromptCompletion", "Tokens", "parse_record"]
NOT_TRAINED = -100
"""The label of a token that is not trained."""
_MAX_ID = 2**32 - 1
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_PREFERENCES = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
_UNUSUAL = frozenset(("tools", "label", *_MEDIA, *(key for pair in _PREFERENCES for key in pair)))
"""Keys next to `messages` that need a look."""
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))
_NO_COLUMNS: Mapping[str, str] = {}


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
Record = Mapping[str, Any]


def parse_record(value: Record, format: str = "auto", columns: Mapping[str, str] = _NO_COLUMNS) -> Example:  # noqa: A002
    """Return the example in a record; `format` other than auto forces its form, `columns` says where our keys are.

    Parts of `value` may be in the result: neither is to be changed. Raises RecordProblem.
    """
    if not columns and format in {"auto", "messages"}:
        plain = _plain(value)
        if plain is not None:
            return plain
    if format == "sharegpt" and not columns and value.get("conversations") is None and "messages" in value:
        columns = {"conversations": "messages"}
    try:
        return _parse(_renamed(value, columns) if columns else value, format, columns)
    except RecordProblem as problem:
        if problem.path and problem.path[0] in columns:
            path = (*columns[str(problem.path[0])].split("."), *problem.path[1:])
            raise RecordProblem(problem.reason, problem.col, path, problem.hint, problem.chat_hint) from problem
        raise


def _plain(value: Record) -> Conversation | None:
    """The commonest record, messages of a role and a string each; None where a closer look is needed."""
    messages = value.get("messages")
    if type(messages) is not list or not messages or (len(value) > 1 and not _UNUSUAL.isdisjoint(value)):
        return None
    for message in messages:
        if (
            type(message) is not dict
            or len(message) != 2
            or type(message.get("content")) is not str
            or type(role := message.get("role")) is not str
            or role not in _PLAIN_ROLES
        ):
            return None
    return Conversation(messages, [None] * len(messages), None)


def _parse(value: Record, format: str, columns: Mapping[str, str]) -> Example:  # noqa: A002 (the recipe's word)
    for key in _MEDIA:
        if value.get(key) and format != "text":
            raise RecordProblem("images, audio and video cannot be trained", path=(key,))
    if format == "auto" and not columns:
        for chosen, rejected in _PREFERENCES:
            if value.get(chosen) is not None and value.get(rejected) is not None:
                ours = "messages" if isinstance(value[chosen], list) else "completion"
                raise RecordProblem(
                    f"a preference row ({chosen}, {rejected}): preferences (DPO, reward models) are not supported yet; "
                    "sft can learn the chosen answers",
                    path=(rejected,),
                    hint=columns_line({ours: chosen}),
                )
        if isinstance(value.get("label"), bool):
            raise RecordProblem(
                "a true or false label makes this a preference row, and preferences (KTO) are not supported yet: "
                "answers labelled false would be learned too; naming the format trains all of them",
                path=("label",),
                hint=f"format: {form_of(value) or 'messages'}",
            )
    forms = _FORMS if format == "auto" else {format: _FORMS[format]}
    if format == "sharegpt":
        forms = {format: (_FORMS[format][0], _from_sharegpt)}
    for keys, parse in forms.values():
        if all(value.get(key) is not None for key in keys):
            return parse(value)
    for keys, parse in forms.values():  # null is judged as a value only where no other form fits
        if all(key in value for key in keys):
            return parse(value)
    raise _unknown(value, [keys for keys, _ in forms.values()], columns)


def form_of(value: Record, columns: Mapping[str, str] = _NO_COLUMNS) -> str | None:
    """Return the form of a record by its keys; None for one of no form. RecordProblem."""
    value = _renamed(value, columns) if columns else value
    matching = (form for form, (keys, _) in _FORMS.items() if all(value.get(key) is not None for key in keys))
    return next(matching, None)


def _unknown(value: Record, wanted: list[tuple[str, ...]], columns: Mapping[str, str]) -> RecordProblem:
    known = [key for keys in wanted for key in keys]
    matches = {key: get_close_matches(key, known, 1, 0.7) for key in list(value)[:64] if key not in known}
    near = [f"{quoted(key)} (did you mean {match[0]!r}?)" for key, match in matches.items() if match]
    names = ", ".join(near[:8] or [quoted(key) for key in list(value)[:8]]) or "no keys"
    reason = f"no {' or '.join(' + '.join(keys) for keys in wanted)}; the row has {names}"
    form = form_of(value)
    if form is not None:
        return RecordProblem(reason, 1, hint=f"format: {form}")
    fallback = COLUMNS_FORM if len(wanted) > 1 and value and not columns and not near else None
    plain, chats = ({} if columns else proposed_columns(value, chats) for chats in (False, True))
    hint, chat_hint = (columns_line(proposed) if proposed else fallback for proposed in (plain, chats))
    return RecordProblem(reason, 1, hint=hint, chat_hint=chat_hint)


def unused_texts(value: Record, columns: Mapping[str, str] = _NO_COLUMNS) -> tuple[str, ...]:
    """Return the keys of a record whose text is not read: neither trained on nor given to the chat template."""
    value = _renamed(value, columns) if columns else value
    form = form_of(value)
    if form is None or form == "tokens":
        return ()
    read = {*_FORMS[form][0], *_ALSO_READ.get(form, ())}
    return tuple(key for key, text in value.items() if key not in read and isinstance(text, str) and text.strip())


def _renamed(value: Record, columns: Mapping[str, str]) -> Record:
    """The record under our names; what was renamed is not seen under its own."""
    view = {key: item for key, item in value.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        item, found = _at(value, theirs)
        if found:
            view[ours] = item
        elif ours not in _OPTIONAL:
            near = get_close_matches(theirs, list(value)[:64], 1, 0.6)
            hint = f"; did you mean {quoted(near[0])}?" if near else ""
            raise RecordProblem(f"no {theirs!r}, which columns names for {ours}{hint}", 1)
    return view


def _at(value: Record, name: str) -> tuple[Any, bool]:
    """The value at a key, or at a dotted path into objects, and whether it is there."""
    if name in value:
        return value[name], True
    item: Any = value
    for part in name.split("."):
        if not isinstance(item, dict) or part not in item:
            return None, False
        item = item[part]
    return item, True


def _listed(value: Record, key: str) -> Any:
    """The value at a key; a list written as JSON text, as a CSV file has to, is read."""
    item = value[key]
    if isinstance(item, str) and item.lstrip()[:1] == "[":
        try:
            return strict_json(item)
        except RecordProblem as problem:
            raise RecordProblem(f"{key}: {problem.reason}", path=(key,)) from problem
    return item


def _items(value: Record, key: str) -> list[Any]:
    items = _listed(value, key)
    if not isinstance(items, list):
        raise RecordProblem(f"{key} is a list, got {type_name(items)}", path=(key,))
    if not items:
        raise RecordProblem(f"{key} is empty", path=(key,))
    return items


def _turns(value: Record, key: str, by_speaker: bool = False) -> list[Message]:
    """Messages of `role` and `content`, or turns of `from` and `value`: each item says by its keys which.

    With `by_speaker` a role may have any of ShareGPT's names, such as human.
    """
    turns = []
    for i, item in enumerate(_items(value, key)):
        if isinstance(item, dict) and "from" in item and "role" not in item:
            turns.append(turn_of(item, (key, i)))
        elif key == "conversations" and isinstance(item, dict) and "role" not in item:
            raise RecordProblem("a turn has from and value", path=(key, i))
        else:
            turns.append(message_of(item, (key, i), by_speaker))
    return turns


def _from_sharegpt(value: Record) -> Example:
    """The form where the recipe names it: what a speaker may be called, a role may be called too."""
    return _conversation(value, _turns(value, "conversations", by_speaker=True), system=True)


def _from_alpaca(value: Record) -> Example:
    """Instruction and input are joined by a line break, as LLaMA-Factory does."""
    messages = []
    history = _listed(value, "history") if value.get("history") else []
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
    answer = check_text(value["output"], ("output",))
    return _conversation(value, [*messages, said_by("user", question), said_by("assistant", answer)], system=True)


def _conversation(value: Record, messages: list[Message], system: bool = False) -> Conversation:
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
    tools = _listed(value, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordProblem("tools is a list of objects", path=("tools",))
    return tools or None


def _from_prompt(value: Record) -> Example:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [{"train": False, **message} for message in _turns(value, "prompt")]
        return _conversation(value, given + _turns(value, "completion"))
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
    items = _items(value, key)
    if set(map(type, items)) != {int} or min(items) < least or max(items) > most:
        wrong = next(i for i, item in enumerate(items) if type(item) is not int or not least <= item <= most)
        raise RecordProblem(f"{key} is a list of token ids", path=(key, wrong))
    return items


def _flags(value: Record, key: str, length: int) -> list[bool]:
    items = _items(value, key)
    wrong = next((i for i, item in enumerate(items) if type(item) not in (int, bool) or item not in (0, 1)), None)
    if wrong is not None:
        raise RecordProblem(f"{key} is a list of 0 and 1", path=(key, wrong))
    _check_length(items, key, length)
    return [bool(item) for item in items]


def _check_length(items: list[Any], key: str, length: int) -> None:
    if len(items) != length:
        raise RecordProblem(f"{key} has {len(items)} entries for {length} tokens", path=(key,))


_MASKS = ("loss_mask", "trained", "assistant_masks", "completion_mask")
_OPTIONAL = frozenset(("system", "tools", "input", "history", "labels", "loss_mask"))
"""Keys that a record may leave out."""
_ALSO_READ = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("tools",),
    "alpaca": ("input", "history", "system", "tools"),
}
"""What a form may read apart from the keys that it needs."""
_FORMS: dict[str, tuple[tuple[str, ...], Callable[[Record], Example]]] = {
    "messages": (("messages",), lambda value: _conversation(value, _turns(value, "messages"))),
    "sharegpt": (
        ("conversations",),
        lambda value: _conversation(value, _turns(value, "conversations"), system=True),
    ),
    "prompt_completion": (("prompt", "completion"), _from_prompt),
    "alpaca": (("instruction", "output"), _from_alpaca),
    "text": (("text",), lambda value: PlainText(check_text(value["text"], ("text",)))),
    "tokens": (("input_ids",), _from_tokens),
}
