"""What the keys of other data sets are called, and which `columns` a record of such keys may need.

Names suggest, and nothing more: `proposals.py` tries each suggestion on the records themselves.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

_MOST_KEYS = 64
_NUMBERED = re.compile(r"[_-]?(\d+|(?<=[_-])[a-z])$")
_WORDS = re.compile(r"[_\W]+")


class KeyNames(NamedTuple):
    """What data sets call the keys of records, the likeliest first; `key_names.json` is the table."""

    prompts: tuple[str, ...]
    asking: tuple[str, ...]
    """Names of a prompt that mean nothing else where there is none by our name."""
    answers: tuple[str, ...]
    plain_answers: tuple[str, ...]
    """Those that name an answer as the last word of a longer key, too."""
    contexts: tuple[str, ...]
    systems: tuple[str, ...]
    texts: tuple[str, ...]
    parts: tuple[str, ...]
    """What else belongs to a prompt or an answer: a row that has one is not learned rightly without it."""
    aside: frozenset[str]
    """Names of what is known about a text: it is no part of it."""
    sides: tuple[tuple[str, str], ...]
    """A preferred answer and the other."""


@cache
def key_names() -> KeyNames:
    """The names, read once."""
    table = json.loads(Path(__file__).with_name("key_names.json").read_bytes())
    lists: dict[str, Any] = {name: tuple(names) for name, names in table.items()}
    return KeyNames(**lists | {"aside": frozenset(lists["aside"]), "sides": tuple(map(tuple, lists["sides"]))})


@dataclass
class ColumnKeys:
    """The keys of a record by what they may hold, each by its name in lower case."""

    texts: dict[str, str] = field(default_factory=dict)
    """Of a text that is no JSON."""
    turns: dict[str, str] = field(default_factory=dict)
    """Of a list of turns or messages, also inside of an object: `input.messages`."""
    sides: tuple[str, str] | None = None
    """Of a preferred answer and the other."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "ColumnKeys":
        """Sort the first keys of a record."""
        found = cls()
        names = {key.lower(): key for key in list(record)[:_MOST_KEYS] if record[key] is not None}
        sides = next((both for both in key_names().sides if set(both) <= set(names)), None)
        found.sides = None if sides is None else (names[sides[0]], names[sides[1]])
        for name, key in names.items():
            value = record[key]
            if key in (found.sides or ()):
                continue
            if turns_in(value) is not None:
                found.turns[name] = key
            elif isinstance(value, str) and not _is_json(value):
                found.texts[name] = key
            elif isinstance(value, dict):
                inside = (part for part in list(value)[:_MOST_KEYS] if turns_in(value[part]) is not None)
                found.turns |= {f"{name}.{part}".lower(): f"{key}.{part}" for part in inside}
        return found

    def named(self, names: Iterable[str]) -> Iterator[str]:
        """The record's keys of a text that have one of the names, in the order of the names."""
        return (self.texts[name] for name in names if name in self.texts)


def learned(record: Mapping[str, Any], chats: bool) -> Iterator[dict[str, str]]:
    """Yield `columns`, ours to theirs, the likeliest first, under which an answer or a text of a record is learned.

    With `chats` the model has a chat template: a question and its answer become turns.
    """
    keys = ColumnKeys.of(record)
    if keys.sides is not None:
        for prompt in _prompts(record, keys, chats):
            yield _other({**prompt, "completion": keys.sides[0]})
    for name, key in keys.turns.items():
        yield from ({"prompt": key, "completion": answer} for answer in keys.named(key_names().answers))
        form = turns_in(value_at(record, key)[0]) or ""
        yield _other({form: key} | ({} if "." not in name else _beside(record, key)) | _system(keys, form))
    for prompt in _prompts(record, keys, chats):
        for answer in keys.named(key_names().answers):
            asked = prompt.get("instruction") or prompt.get("prompt")
            if asked not in (None, answer):
                yield _other({**prompt, ("output" if "instruction" in prompt else "completion"): answer})
    yield from (_other({"text": key}) for key in keys.named(key_names().texts))


def compared(record: Mapping[str, Any], chats: bool) -> Iterator[dict[str, str]]:
    """Yield `columns`, ours to theirs, under which a record may be a pair of answers; `chats` as for `learned`."""
    keys = ColumnKeys.of(record)
    if keys.sides is not None:
        for prompt in _prompts(record, keys, chats):
            yield _other({**prompt, "chosen": keys.sides[0], "rejected": keys.sides[1]})


def labelled(record: Mapping[str, Any], chats: bool) -> Iterator[dict[str, str]]:
    """Yield `columns`, ours to theirs, under which a record with a label may be an answer to a prompt."""
    yield from (columns for columns in learned(record, chats) if "text" not in columns)


def _prompts(record: Mapping[str, Any], keys: ColumnKeys, chats: bool) -> Iterator[dict[str, str]]:
    """Where the prompt may be: under a key that is ours, in turns, or in a text, as a turn and as it is."""
    yield {}
    for name, key in keys.turns.items():
        yield {"prompt": key} | (_beside(record, key) if "." in name else {})
    for key in keys.named(("instruction", *key_names().prompts)):
        context = next((own for own in keys.named(key_names().contexts) if own != key), None)
        turn = {"instruction": key} | ({} if context is None else {"input": context}) | _system(keys, "conversations")
        yield from (turn, {"prompt": key}) if chats else ({"prompt": key}, turn)


def _system(keys: ColumnKeys, form: str) -> dict[str, str]:
    key = next(keys.named(key_names().systems), None)
    return {} if key is None or not form else {"system": key}


def _beside(record: Mapping[str, Any], key: str) -> dict[str, str]:
    """The tools that stand in an object next to its messages."""
    outer = key.rpartition(".")[0]
    return {"tools": f"{outer}.tools"} if value_at(record, f"{outer}.tools")[0] else {}


def _other(columns: Mapping[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in columns.items() if ours != theirs}


def value_at(record: Mapping[str, Any], name: str) -> tuple[Any, bool]:
    """The value at a key, or at a dotted path into objects, and whether it is there."""
    item: Any = record
    for part in [name] if name in record else name.split("."):
        if not isinstance(item, Mapping) or part not in item:
            return None, False
        item = item[part]
    return item, True


def is_part(key: str) -> bool:
    """Whether a key is named as a part of a prompt or of an answer; a number or a letter after it does not count."""
    name = _NUMBERED.sub("", key.lower())
    last, known = words_of(name)[-1:], key_names()
    lost = {*known.contexts, *known.systems, *known.parts}
    named = name in lost or (name in known.prompts and name != "source") or name in known.answers
    return named or not lost.union(known.plain_answers).isdisjoint(last)


def words_of(key: str) -> list[str]:
    """The words of a key: `original_question` has two."""
    return [word for word in _WORDS.split(key.lower()) if word]


def other_side(record: Mapping[str, Any], chosen: str | None) -> str | None:
    """The key of the answer that another was preferred to, by the names of both; None where there is none."""
    names = {key.lower(): key for key in list(record)[:_MOST_KEYS] if record[key] is not None}
    others = (other for side, other in key_names().sides if chosen is not None and side == chosen.lower())
    return next((names[other] for other in others if other in names), None)


def _is_json(text: str) -> bool:
    """Whether a text is a JSON list or object."""
    if text.lstrip()[:1] not in {"[", "{"}:
        return False
    try:
        orjson.loads(text)
    except ValueError:
        return False
    return True


def turns_in(value: Any) -> str | None:
    """Return which of our keys a list of turns belongs under, by the keys of its items; None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = orjson.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return None
    if all("from" in item and "value" in item for item in value):
        return "conversations"
    return "messages" if all("role" in item and ("content" in item or "tool_calls" in item) for item in value) else None
