"""jinja2's filters and tests as chat templates get them: bounded before they are run, by what they would make."""

import json
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.tests import TESTS as DEFAULT_TESTS

from tuner.data.encoding.template_limits import MAX_CHARS, MAX_DEPTH, MAX_POWER, Meter, names, refuse

_SHORT_TEXT = 1024
_STREAMED = names("streamed")
"""What these give is counted one by one, so that a chat of any length passes."""
_TEXTS = names("texts")
TEXT_FILTERS = _TEXTS - {"safe"} | {"tojson"}
"""Filters that give a text whatever they are given."""


def bounded_filters(environment: Any, meter: Meter) -> dict[str, Callable[..., Any]]:
    """The filters of a sandbox."""
    found: dict[str, Callable[..., Any]] = {name: DEFAULT_FILTERS[name] for name in names("free")}
    found |= {name: _bounded(name, DEFAULT_FILTERS[name], meter) for name in _STREAMED | _TEXTS | names("listed")}
    found["tojson"], found["sum"] = partial(_tojson, meter), partial(_sum, environment, meter)
    return found


def bounded_tests(meter: Meter) -> dict[str, Callable[..., Any]]:
    """The tests of a sandbox."""
    tests: dict[str, Any] = {**DEFAULT_TESTS}
    found: dict[str, Callable[..., Any]] = {name: tests[name] for name in names("free_tests")}
    return found | {name: _bounded_test(name, tests[name], meter) for name in names("tests")}


def _bounded(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """A filter that is run where its bound is within limits; what it gives one by one is counted."""
    at = int(hasattr(function, "jinja_pass_arg"))
    is_text = name in _TEXTS

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        value, args = given[at], given[at + 1 :]
        if is_text and type(value) is str and len(value) < _SHORT_TEXT and not args and not named:
            return function(*given)
        if name in _STREAMED:
            meter.weigh((*args, *named.values()))
        else:
            value = _measured(meter, value, is_text)
            if name == "format":
                meter.formatted(value if isinstance(value, str) else str(value), "%", (*args, *named.values()))
            else:
                meter.bound(name, value, args, named)
        made = function(*given[:at], value, *args, **named)
        if isinstance(made, str):
            meter.weigh(made)
        elif isinstance(made, int):
            meter.bits(made.bit_length())
        elif hasattr(type(made), "__next__"):
            return meter.counted(made, 2 + sum(len(each) for each in args if isinstance(each, str)))
        return made

    return bounded


def _measured(meter: Meter, value: Any, is_text: bool) -> Any:
    """A value that is known to be within limits: as it is, or what an iterator gives as a list. LimitError."""
    if not is_text or not isinstance(value, str):
        value = meter.bounded(value)
        meter.charge(meter.weigh(value) >> 2)
    if is_text:
        meter.chars(meter.written(value))
    return value


def _bounded_test(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    at = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*given: Any) -> Any:
        value = _measured(meter, given[at], True)
        meter.weigh(given[at + 1 :])
        if isinstance(value, str) and name in ("divisibleby", "even", "odd"):
            refuse("a remainder of a text")  # of a text `%` fills in its places
        return function(*given[:at], value, *given[at + 1 :])

    return bounded


def _tojson(
    meter: Meter, value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no chat format wants.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    size, between = meter.weigh(value), 0
    if indent is not None or separators is not None:
        between = meter.weigh([indent, separators]) + (abs(indent) if isinstance(indent, int) else 0)
    if between > MAX_POWER:
        refuse(f"JSON with more than {MAX_POWER:,} characters between its items")
    if size * (12 + between * MAX_DEPTH) <= MAX_CHARS:  # twelve characters may stand for one, as \\ud83d\\ude42
        meter.charge(size >> 6)
        return encoder.encode(value)
    pieces, made = [], 0
    for piece in encoder.iterencode(value):
        meter.charge(4 + (len(piece) >> 6))
        made += len(piece)
        if made > MAX_CHARS:
            refuse(f"JSON of more than {MAX_CHARS:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def _sum(environment: Any, meter: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if isinstance(start, str):
        raise TemplateRuntimeError("sum() can't sum strings: use join")
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    for value in meter.bounded(values):
        start = environment.operate("+", start, value)
    return start
