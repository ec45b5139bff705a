"""Names of tensors: globs that choose and rename them, the nearest names, and many names in few lines."""

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from tuner.config.value_types import CAPTURE, WILDCARD

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
NEAREST = 3
SHOWN_NUMBERS = 6


def fits(pattern: str, name: str) -> bool:
    """Whether a glob means a name: the whole of it or from a dot on, and everything below what it means."""
    return re.fullmatch(rf"(?:.*\.)?{_expression(pattern)}(?:\..*)?", name) is not None


def renamed(name: str, table: Mapping[str, str]) -> str:
    """The name by the first glob of ``table`` that means the whole of it; the name itself where none does."""
    for pattern, new in table.items():
        if found := re.fullmatch(_expression(pattern), name):
            return CAPTURE.sub(lambda number: found[int(number[1])], new)  # noqa: B023 - used at once
    return name


def is_renamed(name: str, pattern: str) -> bool:
    """Whether a glob of a table means the whole of a name."""
    return re.fullmatch(_expression(pattern), name) is not None


@cache
def _expression(pattern: str) -> str:
    """A glob as a regular expression with a group for each wildcard."""
    ends = [(found.start(), found.end()) for found in WILDCARD.finditer(pattern)]
    parts, last = [], 0
    for start, end in ends:
        parts += [re.escape(pattern[last:start]), "(.*)" if end - start > 1 else r"([^.]*)"]
        last = end
    return "".join([*parts, re.escape(pattern[last:])])


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known names that are most like a name or a glob, the likest first.

    Up to three more follow where they are as like as the third: `_proj` may stand for that of q, k, v and o.
    """
    names = list(dict.fromkeys(known))
    found = difflib.get_close_matches(name, names, 2 * NEAREST, 0.5)
    likeness = [difflib.SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, like in zip(found, likeness, strict=True) if like >= likeness[:NEAREST][-1]]


def brief(names: Sequence[str]) -> list[str]:
    """The same names in few: those that differ in numbers alone are one, `layers.{0-29}.mlp`, with their numbers."""
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        groups[_NUMBER.sub("{}", name)].append(tuple(map(int, _NUMBER.findall(name))))
    return [_written(template, numbers) for template, numbers in groups.items()]


def _written(template: str, numbers: Sequence[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    count = 1
    for column in columns:
        count *= len(column)
    if count != len(set(numbers)):  # not every combination is there
        return f"{template.replace('{}', '*')} ({len(numbers)} of them)"
    for column in columns:
        template = template.replace("{}", _range(column), 1)
    return template


def _range(column: Sequence[int]) -> str:
    if len(column) == 1:
        return str(column[0])
    if column[-1] - column[0] == len(column) - 1:
        return f"{{{column[0]}-{column[-1]}}}"
    shown = ",".join(map(str, column[:SHOWN_NUMBERS]))
    return f"{{{shown}{',...' if len(column) > SHOWN_NUMBERS else ''}}}"
