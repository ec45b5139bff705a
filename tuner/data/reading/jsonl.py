"""Strict JSON records: one object, no duplicate keys, no NaN, no NUL or lone surrogate, of bounded depth.

Two routes to one verdict. The strict one is Python's `json` with hooks. The fast one is orjson, which itself refuses
NaN, raw control characters, lone surrogates and what is not UTF-8, but keeps the last of two equal keys. That none was
dropped is shown by counting colons: one follows each key as it was written, and every other stands in a string. So
there are as many in the record as keys in the value, plus colons in its strings, exactly where no key was dropped;
`\\u003a`, the other way to write one, is left to the strict route. So is every record for which this is not shown.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import orjson

from tuner.data.reading.problems import KeyPath, RecordProblem, quoted

MAX_DEPTH = 256
"""A record nested deeper is a bad record."""
_FAST_DEPTH = 24
_FLOAT_BOUND = 2.0**63
"""orjson reads an integer of more than 64 bits as a float, which is then at least this large."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u([0-9a-fA-F]{4})|.)", re.DOTALL)
"""Both escapes of a surrogate pair, or one escape: its number where it has one."""
_ESCAPED_COLON = re.compile(rb"\\u003[aA]")
_CONSTANTS = ("NaN", "Infinity", "-Infinity")
_loads = orjson.loads


class _NotFast(Exception):
    """A value that both routes might read in two ways."""


def parse_json_record(raw: bytes) -> dict[str, Any]:
    """Parse one record strictly. RecordProblem with the column of what is wrong."""
    value = fast_json_record(raw)
    return strict_json_record(raw) if value is None else value


def fast_json_record(raw: bytes) -> dict[str, Any] | None:
    """Parse a record that is clean beyond doubt; None where the strict route has to judge."""
    try:
        value: dict[str, Any] = _loads(raw)
        if type(value) is not dict:
            return None
        texts = list(value)
        keys = len(value) + _collect(value.values(), texts, _FAST_DEPTH)
    except (ValueError, _NotFast):
        return None
    text = "".join(texts)
    if "\0" in text:
        return None
    spare = raw.count(b":") - keys
    if spare and (spare != text.count(":") or _ESCAPED_COLON.search(raw)):
        return None
    return value


def strict_json_record(raw: bytes) -> dict[str, Any]:
    """Parse one record with Python's `json`, every rule checked. RecordProblem."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        col = len(raw[: error.start].decode("utf-8")) + 1
        raise RecordProblem(f"not UTF-8: byte 0x{raw[error.start]:02x}", col) from error
    value = strict_json(text)
    if not isinstance(value, dict):
        hint = "; a JSON array cannot be read line by line: write one object per line" if text[:1] == "[" else ""
        raise RecordProblem(f"a row is an object, got {type(value).__name__}{hint}", 1)
    return value


def strict_json(text: str) -> Any:
    """Parse any JSON value strictly. RecordProblem, its column in characters from the text's start."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        _check_depth(value, MAX_DEPTH)
    except json.JSONDecodeError as error:
        raise RecordProblem(f"not JSON: {error.msg}", error.pos + 1) from error
    except RecursionError as error:
        raise RecordProblem("nested too deeply", 1) from error
    except RecordProblem as problem:
        raise RecordProblem(problem.reason, problem.col or _bad_token(text)) from problem
    except ValueError as error:  # an integer of thousands of digits
        raise RecordProblem(f"not JSON: {error}", 1) from error
    if "\\u" in text:
        _check_escapes(text)
    return value


def locate(text: str, path: KeyPath) -> int:
    """Position, from 0, of the value at `path` in valid JSON, or of the nearest value around it."""
    best, depth = 0, 0
    for is_key, here, position, _ in _scan(text):
        if not is_key and len(here) > depth and path[: len(here)] == here:
            best, depth = position, len(here)
    return best


def _collect(items: Iterable[Any], texts: list[str], depth: int) -> int:
    """Count the keys of all objects in these values, and add their strings to `texts`. _NotFast: a number in doubt."""
    if depth < 0:
        raise _NotFast
    count = 0
    for item in items:
        kind = type(item)
        if kind is str:
            texts.append(item)
        elif kind is list:
            count += _collect(item, texts, depth - 1)
        elif kind is dict:
            texts.extend(item)
            count += len(item) + _collect(item.values(), texts, depth - 1)
        elif kind is float and abs(item) >= _FLOAT_BOUND:
            raise _NotFast
    return count


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RecordProblem(f"duplicate key {quoted(key)}")
    return value


def _constant(name: str) -> NoReturn:
    raise RecordProblem(f"{name} is not JSON")


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, (dict, list)):
        if depth == 0:
            raise RecordProblem("nested too deeply", 1)
        for item in value.values() if isinstance(value, dict) else value:
            _check_depth(item, depth - 1)


def _check_escapes(text: str) -> None:
    for match in _ESCAPE.finditer(text):
        code = int(match[1] or "20", 16)
        if code == 0 or 0xD800 <= code <= 0xDFFF:
            raise RecordProblem(f"lone surrogate {match.group()}" if code else "NUL character", match.start() + 1)


def _scan(text: str) -> Iterator[tuple[bool, KeyPath, int, str]]:
    """Walk valid JSON: (whether it is a key, path, position, token) of every key and value."""
    stack: list[list[Any]] = []
    key_next = False
    for match in _TOKEN.finditer(text):
        token, position = match.group(), match.start()
        if token in "}]":
            stack.pop()
            key_next = False
        elif token == ",":
            key_next = stack[-1][0] == "{"
            if not key_next:
                stack[-1][1] += 1
        elif token == ":":
            continue
        elif key_next:
            stack[-1][1] = json.loads(token)
            key_next = False
            yield True, tuple(level[1] for level in stack), position, token
        else:
            yield False, tuple(level[1] for level in stack), position, token
            if token in "{[":
                stack.append([token, None if token == "{" else 0])
                key_next = token == "{"


def _bad_token(text: str) -> int:
    """Column of the first duplicate key or constant."""
    seen: set[KeyPath] = set()
    for is_key, path, position, token in _scan(text):
        if (is_key and path in seen) or (not is_key and token in _CONSTANTS):
            return position + 1
        if is_key:
            seen.add(path)
    return 1
