"""What a method of a text, a list or a number may be asked by a chat template: bounds known before it is called."""

import re
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from jinja2.exceptions import SecurityError

from tuner.data.encoding.template_limits import MAX_BITS, MAX_ITEMS, VIEWS, Meter, refuse

OWNERS = (str, bytes, int, float, list, tuple, dict, range, *VIEWS, MappingProxyType, type)
"""Whose methods are bounded here; the last for those that are called on a class, such as `fromkeys`."""
_WIDTHS = re.compile(r"\d+")
_ESCAPES, _HTML, _SHORT = 10, 6, 9
_SHORT_TEXT = 256
_QUICK = frozenset(
    {"split", "startswith", "endswith", "strip", "lstrip", "rstrip", "rsplit", "upper", "lower", "title", "capitalize"}
    | {"partition", "rpartition", "find", "rfind", "count", "removeprefix", "removesuffix"}
)
"""Methods that are quick where all texts are short."""
_CODECS = frozenset({"utf8", "utf16", "utf32", "ascii", "latin1", "utf16le", "utf16be", "utf32le", "utf32be"})
_ERRORS = frozenset({"strict", "ignore", "replace"})
_BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
_Bound = Callable[[Meter, Any, Sequence[Any]], Sequence[Any] | None]
"""Looks at whose method it is and the arguments, and may give others in their place. LimitError."""


def bound_arguments(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Check a call of a method of `owner`; returns the arguments to call it with. LimitError, SecurityError."""
    if name in _QUICK and type(owner) is str and len(owner) < _SHORT_TEXT and _are_short(args):
        return args
    values = (*args, *kwargs.values())
    for value in values:
        meter.weigh(value)
    bound = _BOUNDS.get(name)
    if bound is not None:
        given = bound(meter, owner, values)
        return args if given is None else tuple(given)
    if name not in PLAIN:
        raise SecurityError(f"the method {name} is not known to be safe")
    meter.charge(_size(owner) >> 4)
    return args


def _are_short(args: tuple[Any, ...]) -> bool:
    return not args or (len(args) == 1 and type(args[0]) is str and len(args[0]) < _SHORT_TEXT)


def formatted(meter: Meter, text: Any, opens: str, values: Sequence[Any]) -> None:
    """Count what a text with places for `values`, each of which `opens` begins, comes to at most. LimitError."""
    source = text if isinstance(text, str) else repr(text)
    widths = _WIDTHS.findall(source)
    if any(len(width) > _SHORT for width in widths):
        refuse("a width of more than nine digits")
    nests = "*" in source if opens == "%" else source.count("{") > source.count("}") or re.search(r"\{[^}]*\{", source)
    numbers = _numbers(values) if nests else []
    escapes = _HTML if hasattr(text, "__html__") else _ESCAPES if re.search(r"![ra]|%[^%]*[ra]", source) else 1
    each = max((meter.written(value) for value in values), default=0) * escapes
    places = source.count(opens)
    meter.chars(len(source) + sum(map(int, widths)) + places * (each + max(numbers, default=0)))


def _numbers(values: Sequence[Any]) -> list[int]:
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(abs(value))
        elif isinstance(value, (list, tuple)):
            found += [abs(each) for each in value if isinstance(each, int)]
        elif isinstance(value, dict):
            found += [abs(each) for each in value.values() if isinstance(each, int)]
    return found


def _size(owner: Any) -> int:
    if isinstance(owner, str):
        return str.__len__(owner)
    return len(owner) if hasattr(type(owner), "__len__") else 1


def _most(values: Sequence[Any]) -> int:
    return max((abs(value) for value in values if isinstance(value, int)), default=8)


def _pads(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    meter.chars(_size(owner) + _most(values))


def _tabs(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    tab: Any = "\t" if isinstance(owner, str) else b"\t"
    meter.chars(_size(owner) + owner.count(tab) * _most(values))


def _to_bytes(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    meter.chars(_most(values))


def _from_bytes(meter: Meter, owner: Any, values: Sequence[Any]) -> Sequence[Any]:
    given = [meter.bounded(values[0]), *values[1:]]
    if hasattr(given[0], "__len__"):
        meter.bits(len(given[0]) << 3)
    return given


def _joins(meter: Meter, owner: Any, values: Sequence[Any]) -> Sequence[Any]:
    given = [meter.bounded(value) for value in values]
    html = _HTML if hasattr(owner, "__html__") else 1
    for each in given[:1]:
        if isinstance(each, str):
            meter.items(len(each))
        meter.chars(html * meter.weigh(each) + _size(owner) * (len(each) if hasattr(each, "__len__") else 0))
    return given


def replaced(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    """Count a text in which one is replaced by another."""
    texts = [value for value in values if isinstance(value, (str, bytes))]
    if len(texts) < 2 or not isinstance(owner, (str, bytes)):
        return
    size, old, new = _size(owner), *map(_size, texts[:2])
    meter.charge(size * min(old, 128) >> 6)
    if (size + 1) * new > MAX_ITEMS:
        times = owner.count(texts[0]) if old else size + 1  # type: ignore[arg-type]
        size += times * new * (_HTML if hasattr(owner, "__html__") else 1)
    meter.chars(size)


def _splits(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    size = _size(owner)
    if size > MAX_ITEMS:
        given = next((value for value in values if isinstance(value, (str, bytes)) and value), None)
        blanks: Sequence[Any] = _BLANKS if isinstance(owner, str) else [b" ", b"\n", b"\t", b"\r", b"\v", b"\f"]
        meter.items(sum(map(owner.count, blanks if given is None else [given])))
        meter.charge(size >> 1)
    meter.charge(size >> 4)


def _splits_from_the_right(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    _searches_from_the_right(meter, owner, values)
    _splits(meter, owner, values)


def _searches_from_the_right(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    # Only the search from the left is made so that it takes no longer than both are long.
    meter.search(_size(owner), max((_size(value) for value in values if isinstance(value, (str, bytes))), default=1))


strips = _searches_from_the_right
"""Count a text from whose ends characters are taken: each may be compared with each that is wanted."""


def _searches(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    meter.weigh(owner)
    wanted = max((_size(value) for value in values if isinstance(value, (str, bytes))), default=1)
    meter.charge(_size(owner) * min(wanted, 128) >> 6)


def cases(meter: Meter, owner: Any, values: Sequence[Any] = ()) -> None:
    """Count a text in another case: three characters may come of one, and the interpreter makes room for them."""
    size = _size(owner)
    meter.chars(size if size < 1024 or owner.isascii() else 3 * size)


def _codecs(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    size = _size(owner)
    known = {str(value).lower().replace("-", "").replace("_", "") for value in values[:2]} <= _CODECS | _ERRORS
    if not known and size > 1024:
        refuse("a text of more than 1,024 characters in an encoding other than UTF")
    meter.chars(4 * size)


def _translates(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    table = values[0] if values else ()
    items = table.values() if isinstance(table, dict) else table if isinstance(table, (list, tuple)) else ()
    longest = max((_size(each) for each in items if isinstance(each, str)), default=1)
    meter.chars(_size(owner) * max(longest, 1) * (1 if isinstance(owner, str) else 0))


def _tables(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    meter.items(4 * sum(_size(value) for value in values))


def _keyed(meter: Meter, owner: Any, values: Sequence[Any]) -> Sequence[Any]:
    return [meter.bounded(value) for value in values[:1]] + list(values[1:])


def _hexes(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    meter.chars(3 * _size(owner))


def _unhexes(meter: Meter, owner: Any, values: Sequence[Any]) -> None:
    if any(_size(value) > MAX_BITS for value in values):
        refuse(f"a number of more than {MAX_BITS:,} digits")


def _bounds() -> dict[str, _Bound]:
    of: dict[_Bound, str] = {
        _pads: "center ljust rjust zfill",
        _tabs: "expandtabs",
        _to_bytes: "to_bytes",
        _from_bytes: "from_bytes",
        _joins: "join",
        replaced: "replace",
        _splits: "split splitlines",
        _splits_from_the_right: "rsplit",
        _searches_from_the_right: "rfind rindex rpartition strip lstrip rstrip",
        _searches: "count find index partition startswith endswith removeprefix removesuffix isdisjoint",
        cases: "upper lower title capitalize casefold swapcase",
        _codecs: "encode decode",
        _translates: "translate",
        _tables: "maketrans",
        _keyed: "fromkeys",
        _hexes: "hex",
        _unhexes: "fromhex",
    }
    return {name: bound for bound, names in of.items() for name in names.split()}


_BOUNDS = _bounds()
PLAIN = frozenset(
    {"isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable"}
    | {"isspace", "istitle", "isupper", "items", "keys", "values", "get", "copy", "as_integer_ratio", "bit_count"}
    | {"bit_length", "conjugate", "is_integer"}
)
"""Methods that take as long as what they are asked of is large, and give no more. `format` is the sandbox's own."""
BOUNDED = frozenset(_BOUNDS)
