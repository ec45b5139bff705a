"""What one render of a chat template may take: steps, processor time, memory, and the size of any one value.

A call into C cannot be interrupted, and a render in a process of its own would cost as much again as rendering does. So
no operation of a template is begun before it is known that its result stays within the limits (`template_sandbox.py`),
and each is charged for what it copies or compares. Whenever a slice of work is used up, the clock and the resident
memory are looked at: a render that uses up none, as most, pays for neither.
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

from tuner.runtime.memory import resident_bytes

MAX_SOURCE_CHARS, MAX_TOKENS, MAX_NESTING = 1 << 18, 1 << 14, 100
"""Of a template's source: its characters, its tokens, and how deep its statements and expressions lie in each other."""
MAX_STEPS = 2_000_000
"""Rounds of loops and calls of macros in one render: an endless template stops, on all machines alike."""
MAX_SECONDS, FIRST_SECONDS, MESSAGE_SECONDS = 1.0, 0.2, 0.01
"""Processor time of one render: at most, for the first message, and for each more."""
MAX_WASTED_SECONDS = 1.0
"""Processor time of all renders of a template that took theirs and gave no text: then it is given up for all rows."""
_QUICK_SECONDS = 0.005
MAX_GROWN_BYTES = 128 << 20
"""Resident memory that the process may gain while it renders."""
MAX_CHARS, MAX_ITEMS = 1 << 24, 1 << 20
"""Of any text, and of any list, that a template makes or compares; those of lists in it count too."""
MAX_DEPTH = 200
"""How deep a value that a template writes, compares or uses as a key lies in others."""
MAX_BITS, MAX_POWER = 1 << 13, 1000
"""Of a whole number that a template computes; the largest exponent and number of decimals."""
MAX_SLOW_CHARS = 1 << 16
"""Of a text for `title`, which jinja2 goes through word by word."""
MAX_TIME_CHARS = 1000
"""Of the form in which a template asks for the time."""
MAX_SEARCH = 1 << 28
"""Characters times characters that are looked for, where a search may compare each with each."""

_SLICE = 1 << 17
"""Units of work between two looks at the clock: some ten milliseconds. A unit is about what a small operation takes."""
_SMALL = 1 << 12
_MAPPINGS: tuple[Any, ...] = (dict, MappingProxyType, *map(type, ({}.keys(), {}.values(), {}.items())))
_NESTS = (list, tuple, set, frozenset, Namespace, *_MAPPINGS)
_NUMBER_CHARS, _OTHER_CHARS = 24, 100
_NAMES: dict[str, str] = json.loads(Path(__file__).with_name("template_names.json").read_bytes())


def names(row: str) -> frozenset[str]:
    """Names of jinja2's filters, tests and functions and of methods, by what is known of them: a row of the table."""
    return frozenset(_NAMES[row].split())


_CASES, _ESCAPES, _SPLITS = names("cases"), names("escapes"), names("splits")
_FROM_THE_RIGHT = names("from_the_right")
"""Of these a search may compare each character with each; only that from the left is as long as both texts are."""
_ONCE, _LINES = names("once"), names("lines")
_GROWING = _CASES | _ESCAPES | _ONCE | _LINES | {"replace", "join", "round"}
KNOWN = _GROWING | _SPLITS | _FROM_THE_RIGHT | names("kept")
"""Those that are not growing give no more than they are given; a number that they are given is a place, or a value."""
_BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
_WIDTHS = re.compile(r"\d+")


class LimitError(Exception):
    """A template goes beyond a limit; the message says which."""


def refuse(what: str) -> NoReturn:
    """End the render. Raises LimitError."""
    raise LimitError(what)


class Meter:
    """Counts what a render takes."""

    def __init__(self) -> None:
        self._wasted = 0.0
        self.begin()

    def begin(self, messages: int = 0) -> None:
        """Begin with a render of so many messages: nothing is used up."""
        self._seconds = min(MAX_SECONDS, FIRST_SECONDS + MESSAGE_SECONDS * messages)
        self._began = time.thread_time()
        self.steps = MAX_STEPS
        self.left = _SLICE
        self._resident: int | None = None

    def given_up(self) -> bool:
        """Count a render that gave no text, where it took its time; whether there were too many of them."""
        took = time.thread_time() - self._began
        if took > _QUICK_SECONDS:
            self._wasted += took
        return self._wasted > MAX_WASTED_SECONDS

    def step(self, cost: int) -> bool:
        """One round of a loop, or one call of a macro, of so many operations; true."""
        self.steps -= 1
        if self.steps < 0:
            refuse(f"more than {MAX_STEPS:,} steps")
        self.left -= cost
        if self.left < 0:
            self._look()
        return True

    def charge(self, units: int) -> None:
        """Count work."""
        self.left -= units
        if self.left < 0:
            self._look()

    def chars(self, count: int) -> None:
        """Count a text that is about to be made."""
        if count > MAX_CHARS:
            refuse(f"a text of more than {MAX_CHARS:,} characters")
        self.charge(count >> 6)

    def items(self, count: int) -> None:
        """Count a list that is about to be made."""
        if count > MAX_ITEMS:
            refuse(f"a list of more than {MAX_ITEMS:,} items")
        self.charge(count >> 4)

    def bits(self, count: int) -> None:
        """Count a whole number that is about to be made."""
        if count > MAX_BITS:
            refuse(f"a number of more than {MAX_BITS:,} bits")
        self.charge(count >> 6)

    def bound(self, name: str, value: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Count what a method or filter makes: at most `value`, with the largest argument in each of its places."""
        if name not in KNOWN:
            raise SecurityError(f"{name} is not known to be safe")
        size = self.weigh(value) if not isinstance(value, _MAPPINGS) else len(value)  # a message asked for its content
        largest = 8 if name in _LINES else 0
        for each in (*args, *named.values()):
            if not isinstance(each, int):
                largest = max(largest, self.written(each))
            elif name in _GROWING:
                largest = max(largest, abs(each))
                if largest > MAX_ITEMS:
                    refuse(f"a number of more than {MAX_ITEMS:,}")
        if name in _SPLITS and size > MAX_ITEMS:
            texts = [each for each in (*args, *named.values()) if isinstance(each, str)]
            self.items(sum(map(value.count, texts or _BLANKS)))
        if name in _FROM_THE_RIGHT and size * largest > MAX_SEARCH:
            refuse(f"a search of {largest:,} characters in {size:,}")
        if name == "title" and size > MAX_SLOW_CHARS:
            refuse(f"a text of more than {MAX_SLOW_CHARS:,} characters for `title`")
        if name in _GROWING:
            size += _grown(name, value, size, largest, args)
        self.chars(size)
        self.charge(size if name == "title" else size * largest >> 8)

    def formatted(self, text: str, opens: str, values: Sequence[Any]) -> None:
        """Count what a text with places for `values`, each of which `opens` begins, comes to at most. LimitError."""
        widths = _WIDTHS.findall(text)
        if any(len(width) > 9 for width in widths):
            refuse("a width of more than nine digits")
        parsed = Formatter().parse(text) if opens == "{" else ()
        if any("{" in (spec or "") for _, _, spec, _ in self.counted(parsed, 2)):
            refuse("a width that is an argument")
        escapes = 6 if hasattr(text, "__html__") else 10 if re.search(r"![ra]|%[^%]*[ra]", text) else 1
        each = max((self.written(value) for value in values), default=0) * escapes
        if opens == "%" and "*" in text:
            numbers = [number for value in values for number in _inside(value) if isinstance(number, int)]
            each += max(map(abs, numbers), default=0)
        self.chars(len(text) + sum(map(int, widths)) + text.count(opens) * each)

    def bounded(self, values: Any) -> Any:
        """The values as something of a known and bounded size: themselves, or what an iterator gives, as a list."""
        if not isinstance(values, Sized):
            if not isinstance(values, Iterable):
                return values
            values = list(islice(values, MAX_ITEMS + 1))
        self.items(len(values) if not isinstance(values, str) else str.__len__(values))
        return values

    def listed(self, value: Any) -> Any:
        """An argument: a text as it is, anything else `bounded`."""
        return value if isinstance(value, str) else self.bounded(value)

    def counted(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        """The same values, each of which is charged when it is read."""
        for value in values:
            self.charge(cost)
            yield value

    def weigh(self, value: Any) -> int:
        """The characters of a value written out, with all that is in it however often it is in it. LimitError."""
        if isinstance(value, str):
            chars = str.__len__(value)
            if chars > _SMALL:
                self.chars(chars)
            return chars
        if not isinstance(value, _NESTS):
            return _chars_of(value)
        level, chars, count, depth = [value], 0, 0, 0
        while level:
            depth += 1
            below: list[Any] = []
            for one in level:
                if isinstance(one, str):
                    chars += str.__len__(one) + 2
                elif isinstance(one, _NESTS):
                    below += _inside(one)
                else:
                    chars += _chars_of(one)
                if len(below) > MAX_ITEMS:
                    break
            count += len(level) + len(below)
            if depth > MAX_DEPTH:
                refuse(f"a value more than {MAX_DEPTH} deep")
            self.items(count)
            self.chars(chars)
            self.charge(len(level) << 2)
            level = below
        return chars + 4 * count

    def written(self, value: Any) -> int:
        """The characters of a value as text; what is in lists may be written out in escapes. LimitError."""
        chars = self.weigh(value)
        return chars if isinstance(value, str) else chars << 2

    def _look(self) -> None:
        """See what was used up. LimitError."""
        self.left = _SLICE
        resident = resident_bytes() or 0
        if self._resident is None:
            self._resident = resident
        if resident > self._resident + MAX_GROWN_BYTES:
            refuse(f"more than {MAX_GROWN_BYTES >> 20} MiB of memory")
        if time.thread_time() - self._began > self._seconds:
            refuse(f"more than {self._seconds:.2g} s of processor time")


def _grown(name: str, value: Any, size: int, largest: int, args: Sequence[Any]) -> int:
    """The characters that come to a value of so many; `largest` is the size of the largest argument."""
    if name in _CASES:
        return 0 if size < 1024 or (isinstance(value, str) and value.isascii()) else 2 * size
    html = 6 if any(hasattr(each, "__html__") for each in (value, *args)) else 1
    largest = 5 if name in _ESCAPES else largest * html
    if name == "join":
        return size * (html - 1) + largest * (len(value) if isinstance(value, Sized) else 0)
    if name in _ONCE:
        return largest
    if not isinstance(value, str) or (size + 1) * largest <= MAX_ITEMS:
        return largest * size
    if name in _ESCAPES:
        return largest * sum(map(value.count, "&<>'\""))
    if name == "replace" and args:
        return largest * value.count(str(args[0]))
    return largest * (value.count("\t") + value.count("\n") + 1 if name in _LINES else size + 1)


def _inside(nest: Any) -> Iterable[Any]:
    if isinstance(nest, (dict, MappingProxyType)):
        return [*nest.keys(), *nest.values()]
    if isinstance(nest, Namespace):
        return list(object.__getattribute__(nest, "__dict__").values())  # it shows its own names alone
    return nest if isinstance(nest, _NESTS) else [nest]


def _chars_of(value: Any) -> int:
    if isinstance(value, int):
        return _NUMBER_CHARS + value.bit_length() // 3
    return _NUMBER_CHARS + 4 * len(value) if isinstance(value, bytes) else _OTHER_CHARS if value is not None else 4
