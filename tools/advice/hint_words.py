"""The ways out that a message proposes, read out of its text as its reader would, and applied.

A way is a mapping: a key of the recipe with its value (None: the key is taken out), a flag with its value (True: it has
none; None: it is left out), and under `$` the command lines to run first.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.advice.proposals import plain, value_at, written
from tuner.config.fields import Field, fields, find
from tuner.config.value_types import Table

Way = dict[str, Any]
RUN = "$"
AND = " && "
_TOKEN = re.compile(
    r"(?<![\w./-])(?:"
    r"(?P<shell>(?:mv|rm) [^;&]+?)(?= && |;|$)"
    r"|tuner (?P<command>[a-z][a-z-]+(?: (?!&&|(?:or|and|then|to|on|with|which|says)\b)[^\s;,()]+)*)"
    r"|(?P<without>leave out |remove )?(?P<flag>--[a-z][\w.-]*)"
    r"(?: (?P<given>(?!(?:or|and|with|that|to|at|first)\b)[^\s;,()]+))?"
    r"|(?:remove|leave out) (?:the |its )?(?P<removed>[a-z_]+(?:\.[a-z_]+)*)"
    r"|leave (?P<left>[a-z_]+(?:\.[a-z_]+)*) out\b"
    r"|(?P<such>[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)*), such as (?=\S)"
    r"|(?P<key>[a-z_][a-z_0-9]*(?:\.[a-z_0-9]+)*): (?!tuner )(?=\S)"
    r"|write (?!--|tuner |[a-z_0-9.]+: |(?:[a-z_0-9]+\.)[a-z_0-9]+,)(?=[\w.\[{'\"])"
    r")"
)
_VERB = re.compile(r"(?<!-)\b(?:write|set|remove|leave|did you mean|name|say)\b")
_SEPARATOR = re.compile(r", or | or |, ")
SECTIONS = {key.partition(".")[0] for key in fields() if "." in key}
_OTHER_WAY = re.compile(r"\bor\b|;|\s{3,}(?!\s*then\b)")


class Line(NamedTuple):
    """A line of output without what stands before its text, the key that it is about, and whether it is all advice."""

    text: str
    blamed: str = ""
    is_hint: bool = False


def ways(said: Line) -> list[Way]:
    """The ways that a line of output proposes, in their order."""
    line, blamed, is_hint = said
    if not is_hint and (verb := _VERB.search(line)) is not None:
        line = line[verb.start() :]  # what stands before it reports
    found: list[Way] = [{}]
    end = 0
    for match in _TOKEN.finditer(line):
        if match.start() < end:
            continue
        choices, after = _choices(line, match, blamed)
        if not choices:
            continue
        if found[-1] and _OTHER_WAY.search(line[end : match.start()]):
            found.append({})
        before = found.pop()
        found += [_joined(before, choice) for choice in choices]
        end = after
    return [way for way in found if way]


def _joined(one: Way, other: Way) -> Way:
    commands = [*one.get(RUN, ()), *other.get(RUN, ())]
    return {**one, **other, **({RUN: commands} if commands else {})}


def _choices(line: str, match: re.Match[str], blamed: str) -> tuple[list[Way], int]:
    """What a token of a line proposes, and where that ends: several where one of several values is to be chosen."""
    if match["shell"]:
        return [{RUN: [match["shell"]]}], match.end()
    if match["command"]:
        return [{RUN: [match["command"]]}], match.end()
    if match["flag"]:
        flag = match["flag"].rstrip(".-")
        if match["without"]:
            return [{flag: None}], match.start("flag") + len(flag)
        return [{flag: match["given"] or True}], match.end()
    if (gone := match["removed"] or match["left"]) is not None:
        if gone in SECTIONS:
            return [{gone: None}], match.end()
        field = _field(gone, blamed)
        return ([{field.key: None}] if field is not None else []), match.end()
    name = match["such"] or match["key"] or blamed
    if name in SECTIONS:
        text = value_at(line[match.end() :])
        return ([{name: plain(text)}] if text.startswith("{") else []), match.end() + len(text)
    field = _field(name, blamed)
    if field is None:
        return [], match.end()
    values, length = _values(line[match.end() :], field)
    return [{field.key: value} for value in values], match.end() + length


def _field(name: str, blamed: str) -> Field | None:
    """The field that a name means in a message about a key: of its own section before others. ValueError: which one?"""
    if "." in name or find(name) is not None:
        return find(name)
    if (own := find(f"{blamed.rpartition('.')[0]}.{name}")) is not None:
        return own
    every = [key for key in fields() if key.endswith(f".{name}")]
    if len(every) > 1:
        raise ValueError(f"{name} is of {' and of '.join(every)}: which of them?")
    return find(every[0]) if every else None


def _values(text: str, field: Field) -> tuple[list[Any], int]:
    """The values that a text begins with, one or several of which one is to be chosen, and their length."""
    if text[:1] in {"[", "{", "'", '"'}:
        whole = value_at(text)
        return ([plain(whole)] if _takes(field, whole) else []), len(whole)
    end = re.search(r"[;(]|\s{3,}|[.?:]?$", text)
    assert end is not None
    parts: list[Any] = []
    place, length = 0, 0
    for gap in [*_SEPARATOR.finditer(text, 0, end.start()), end]:
        part = text[place : gap.start()]
        if not _takes(field, part) or ": " in part or (parts and field.takes_text and " " in part):
            break
        parts.append(plain(part))
        place, length = gap.end(), gap.start()
    if parts and (len(parts) == 1 or " or " in text[:length]):
        return parts, length
    words = text[: length or end.start()].split(" ")
    for count in range(len(words), 0, -1):
        value = " ".join(words[:count]).rstrip(".?:,")
        if _takes(field, value):
            return [plain(value)], len(value)
    return [], 0


def _takes(field: Field, text: str) -> bool:
    try:
        value = plain(text)
        if field.value_type is not None and not isinstance(field.value_type, Table):
            field.value_type.check(value)
    except ValueError:
        return False
    return True


def with_words(line: str, way: Mapping[str, Any]) -> str:
    """A command line with the flags of a way: those that it has get the new value, or go; of several, the last one."""
    *before, line = line.split(AND)
    result = shlex.split(line)
    for flag, value in way.items():
        if not flag.startswith("--"):
            continue
        if flag in result:
            place = result.index(flag)
            has_value = place + 1 < len(result) and not result[place + 1].startswith("--")
            del result[place : place + 1 + has_value]
        if value is not None:
            result += [flag] if value is True else [flag, str(value)]
    return AND.join([*before, shlex.join(result).replace(" '<' ", " < ")])


def with_lines(values: Mapping[str, Any], way: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of dotted keys, as sections, with the lines of a way written into it and taken out of it."""
    lines = {key: value for key, value in way.items() if find(key) is not None or key in SECTIONS}
    whole = {key for key in lines if key in SECTIONS}
    kept = {
        key: value for key, value in values.items()
        if key not in lines and key.partition(".")[0] not in whole and value is not None
    }  # fmt: skip
    tree = written(written({}, kept), {key: value for key, value in lines.items() if value is not None})
    return {section: value for section, value in tree.items() if value != {}}


def placed(lines: Sequence[str]) -> Iterator[Line]:
    """The lines of output; a hint is about the key that the line before it is about."""
    blamed = ""
    for line in lines:
        text = re.sub(r"^\s*(?:error|hint|warning|note): ", "", line).strip()
        if place := re.match(r"(?:\S+:\d+:\d+|flag --\S+(?: \S+)?)  (?:(?P<key>[\w.]+)  )?", text):
            flag = re.match(r"flag --([\w.]+)", text)
            blamed = place["key"] or (flag[1] if flag else "")
            text = text[place.end() :]
        elif not line.lstrip().startswith("hint:"):
            named = [key for key in re.findall(r"(?<![\w./-])[a-z_]+\.[a-z_.]+[a-z_]", text) if find(key) is not None]
            blamed = named[0] if named else ""
        yield Line(text, blamed, line.lstrip().startswith("hint:"))
