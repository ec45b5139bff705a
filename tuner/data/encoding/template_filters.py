"""jinja2's filters and tests as chat templates get them: bounded before they are run, by what they would make."""

import json
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import FILTERS as DEFAULT_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.tests import TESTS as DEFAULT_TESTS

from tuner.data.encoding.template_limits import MAX_CHARS, MAX_DEPTH, MAX_POWER, Meter, refuse
from tuner.data.encoding.template_methods import cases, formatted, replaced, strips

_Check = Callable[[Meter, Any, Sequence[Any]], Any]
"""Looks at what a filter is given, with its arguments, and returns what it is to be given. LimitError."""
_MAX_DIGITS = 5000
_SHORT_TEXT = 1024


def _text(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    meter.chars(meter.written(value))
    return value


def _escaped(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    size = meter.written(value)
    if size * 6 > MAX_CHARS and isinstance(value, str):
        size += 5 * sum(map(value.count, "&<>'\""))
    meter.chars(size)
    return value


def _trim(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    _text(meter, value, ())
    if arguments:
        strips(meter, value if isinstance(value, str) else str(value), arguments)
    return value


def _case(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    _text(meter, value, ())
    if isinstance(value, str):
        cases(meter, value)
    return value


def _replace(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    _text(meter, value, ())
    for each in arguments:
        meter.written(each)
    replaced(meter, value if isinstance(value, str) else str(value), [*map(str, arguments[:2])])
    return value


def _padded(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    """A text that widths are added to: as many as it has lines, or words."""
    lines = value.count("\n") + 1 if isinstance(value, str) else 1
    widths = [meter.weigh(each) if isinstance(each, str) else abs(each) for each in arguments if _is_width(each)]
    meter.chars(meter.written(value) + lines * max(widths, default=80))
    return value


def _wrapped(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    longest = max((meter.weigh(each) for each in arguments if isinstance(each, str)), default=1)
    meter.chars(meter.written(value) * (longest + 1))
    return _slow(meter, value, arguments)


def _is_width(value: Any) -> bool:
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def _slow(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    value = meter.bounded(value)
    meter.slow(meter.written([value, *arguments]))
    return value


def _formatted(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    _text(meter, value, ())
    formatted(meter, value if isinstance(value, str) else str(value), "%", arguments)
    return value


def _remainder(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    # Of a text `%` is no remainder: it fills in its places.
    return _formatted(meter, value, arguments) if isinstance(value, str) else value


def _digits(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    if isinstance(value, (str, bytes)) and len(value) > _MAX_DIGITS:
        refuse(f"a number of more than {_MAX_DIGITS:,} digits")
    return value


def _rounded(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    if any(isinstance(each, int) and abs(each) > MAX_POWER for each in arguments):
        refuse(f"more than {MAX_POWER:,} decimals")
    return value


def _parts(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    """A list that is cut into as many parts as are asked for, or filled up to them."""
    for each in arguments:
        if isinstance(each, int):
            meter.items(abs(each))
    return meter.bounded(value)


def _listed(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    return meter.bounded(value)


def _weighed(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    """What is compared, item by item, or written."""
    value = meter.bounded(value)
    meter.charge(meter.weigh(value) >> 2)
    if arguments:
        meter.weigh(arguments)
    return value


def _joined(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    value = meter.bounded(value)
    size = meter.written(value) if not isinstance(value, str) else len(value)
    between = max((meter.written(each) for each in arguments), default=0)
    meter.chars(size + between * (len(value) if hasattr(value, "__len__") else 0))
    return value


def _mapped(meter: Meter, value: Any, arguments: Sequence[Any]) -> Any:
    meter.weigh(arguments)
    return value


_CHECKS: dict[_Check, str] = {
    _text: "string truncate safe",
    _escaped: "e escape forceescape",
    _trim: "trim",
    _case: "capitalize lower upper",
    _replace: "replace",
    _padded: "center indent",
    _wrapped: "wordwrap",
    _slow: "pprint striptags title urlencode urlize wordcount xmlattr",
    _formatted: "format",
    _digits: "float int filesizeformat",
    _rounded: "round",
    _parts: "batch slice",
    _listed: "list reverse",
    _weighed: "dictsort groupby max min sort unique",
    _joined: "join",
    _mapped: "items map reject rejectattr select selectattr",
}
_FREE = ("abs", "attr", "count", "d", "default", "first", "last", "length", "random")
_OWN = ("sum", "tojson")
TEXT_FILTERS = frozenset(
    {"capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace", "string"}
    | {"striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "urlize", "wordwrap", "xmlattr"}
)
"""Filters that give a text whatever they are given."""
_TESTED: dict[_Check, str] = {
    _weighed: "== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in filter test sameas",
    _text: "lower upper",
    _remainder: "divisibleby even odd",
}
_FREE_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "sequence", "string", "true", "undefined"),
)
FILTERS = frozenset(" ".join((*_CHECKS.values(), *_FREE, *_OWN)).split())
TESTS = frozenset(" ".join((*_TESTED.values(), *_FREE_TESTS)).split())
"""Those that are known here; any others are refused as unknown."""


def bounded_filters(environment: Any, meter: Meter) -> dict[str, Callable[..., Any]]:
    """The filters of a sandbox."""
    found: dict[str, Callable[..., Any]] = {name: DEFAULT_FILTERS[name] for name in _FREE}
    for check, names in _CHECKS.items():
        found |= {name: _bounded(DEFAULT_FILTERS[name], check, meter) for name in names.split()}
    found["tojson"], found["sum"] = partial(_tojson, meter), partial(_sum, environment, meter)
    return found


def bounded_tests(environment: Any, meter: Meter) -> dict[str, Callable[..., Any]]:
    """The tests of a sandbox."""
    tests: dict[str, Any] = {**DEFAULT_TESTS}
    found: dict[str, Callable[..., Any]] = {name: tests[name] for name in _FREE_TESTS}
    for check, names in _TESTED.items():
        found |= {name: _bounded(tests[name], check, meter) for name in names.split()}
    return found


def _bounded(function: Callable[..., Any], check: _Check, meter: Meter) -> Callable[..., Any]:
    """A filter that is run where its check passes; what it gives one by one is counted."""
    at = int(hasattr(function, "jinja_pass_arg"))
    quick = check in (_text, _trim, _case, _escaped)

    @wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        value = given[at]
        if quick and type(value) is str and len(value) < _SHORT_TEXT and len(given) == at + 1 and not named:
            return function(*given)
        arguments = (*given[at + 1 :], *named.values())
        value = check(meter, value, arguments)
        made = function(*given[:at], value, *given[at + 1 :], **named)
        if isinstance(made, str):
            size = str.__len__(made)
            if size > 1024:
                meter.chars(size)
        elif hasattr(type(made), "__next__"):
            return meter.counted(made, 2 + sum(len(each) for each in arguments if isinstance(each, str)))
        return made

    return bounded


def _tojson(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
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
