"""Points of a fit: a model's size, the tokens it was trained on, and what was measured then; from a ladder or a CSV."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tuner.config.ladder import short_count
from tuner.config.numbers import parse_number
from tuner.errors import DataError, RecipeError
from tuner.ladder.record import Mark

LOSS = "loss"
NAMES = {
    "rung": ("rung", "model", "name"),
    "parameters": ("parameters", "params", "n", "model size"),
    "tokens": ("tokens", "d", "training tokens"),
    "phase": ("phase",),
}
"""Names of the columns that a point is made of, in capitals or not."""
NO_FIGURES = frozenset({"total parameters", "multiple", "step"})
"""Further columns of `tuner ladder metrics` that say which mark a line is, and were not measured."""
NEEDED = ("parameters", "tokens")
INITIAL, PRE_DECAY, POST_DECAY = "initial", "pre-decay", "post-decay"
MAX_CHARACTERS = 64 << 20


Axis = Literal["parameters", "tokens"]
Along = Axis | Literal["flops"]


@dataclass(frozen=True)
class Size:
    """A model's parameters and the tokens it is trained on."""

    parameters: float
    tokens: float

    def along(self, axis: Along) -> float:
        """One of the two, or the FLOPs of both."""
        return float(getattr(self, axis))

    @property
    def flops(self) -> float:
        """Training FLOPs as the field counts them, 6 N D."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Point:
    """One model at one moment of its training; `figures` has its loss and every other measured figure by name."""

    rung: str
    parameters: float
    tokens: float
    figures: Mapping[str, float] = field(default_factory=dict)
    is_decayed: bool = True
    """Whether the learning rate had decayed: before, the loss is higher than what these tokens can reach."""

    @property
    def size(self) -> Size:
        """The model's, and the tokens until then."""
        return Size(self.parameters, self.tokens)


def points_of(marks: Sequence[Mark]) -> list[Point]:
    """Marks of a ladder's rungs as points; those before the first step are none: a law has no value at 0 tokens."""
    return [
        Point(mark.rung, mark.parameters, mark.tokens, mark.measured(), mark.phase == POST_DECAY)
        for mark in marks
        if mark.phase != INITIAL
    ]


def read_points(path: Path) -> list[Point]:
    """Read a CSV: a heading, then one point a line, in columns by name.

    `parameters` and `tokens` are needed (`190M` is a number too), `rung` and `phase` may be there, and every other
    column is a figure, empty where it was not measured; columns of text are left out. Raises DataError with the line.
    """
    try:
        if path.stat().st_size > MAX_CHARACTERS:
            raise DataError(f"{path}: larger than {MAX_CHARACTERS >> 20} MiB", hint="give one line for each point")
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such file", hint="make one with: tuner ladder metrics LADDER > points.csv"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text", hint="give a CSV file with a heading") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    return parse_points(text, str(path))


def parse_points(text: str, name: str) -> list[Point]:
    """The points of a CSV's text; `name` is what errors call it."""
    try:
        lines = list(csv.reader(text.splitlines(keepends=True)))
    except csv.Error as error:
        raise DataError(f"{name}: {error}", hint="give a CSV file with a heading") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if any(cell.strip() for cell in line)]
    if not numbered:
        raise DataError(f"{name} is empty", hint=f"its first line names the columns: rung,{','.join(NEEDED)},{LOSS}")
    heading = [cell.strip() for cell in numbered[0][1]]
    columns = _columns(heading, name)
    others = NO_FIGURES | {""}
    figures = [i for i, cell in enumerate(heading) if _key(cell) not in others and i not in columns.values()]
    points = []
    for number, line in numbered[1:]:
        if len(line) != len(heading):
            raise DataError(f"{name}:{number}: {len(line)} cells, and the heading has {len(heading)}")
        if "phase" in columns and line[columns["phase"]].strip().lower() == INITIAL:
            continue
        sizes = {key: _size(line[columns[key]], f"{name}:{number}: {heading[columns[key]]}") for key in NEEDED}
        measured = {heading[i]: value for i in figures if (value := _figure(line[i])) is not None}
        rung = line[columns["rung"]].strip() if "rung" in columns else ""
        is_decayed = "phase" not in columns or _is_decayed(line[columns["phase"]], f"{name}:{number}")
        rung = rung or short(sizes["parameters"])
        points.append(Point(rung, sizes["parameters"], sizes["tokens"], measured, is_decayed))
    return points


def with_figure(points: Sequence[Point], name: str) -> list[Point]:
    """The points at which a figure was measured, finite and above zero. Raises RecipeError for one that none has."""
    require_figure(points, name)
    return [point for point in points if point.figures.get(name, 0.0) > 0 and math.isfinite(point.figures[name])]


def require_figure(points: Sequence[Point], name: str) -> None:
    """Raise RecipeError for a figure that no point has, with those that there are."""
    known = dict.fromkeys(figure for point in points for figure in point.figures)
    if name not in known:
        raise RecipeError(f"no point has a figure {name}", hint=f"there are: {', '.join(known) or 'none'}")


def by_rung(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each rung by tokens; rungs by parameters."""
    found: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.parameters, point.rung, point.tokens)):
        found.setdefault(point.rung, []).append(point)
    return found


def short(count: float) -> str:
    """A count in four figures: `190M`, `1.5B`."""
    return short_count(count, 4)


def _columns(heading: Sequence[str], name: str) -> dict[str, int]:
    """Where each column that is no figure is. Raises DataError for one that is missing or there twice."""
    lower = [_key(cell) for cell in heading]
    twice = next((cell for cell in heading if cell and heading.count(cell) > 1), None)
    if twice is not None:
        raise DataError(f"{name}:1: two columns {twice}", hint="name each column once")
    found = {}
    for key, names in NAMES.items():
        places = [lower.index(one) for one in names if one in lower]
        if places:
            found[key] = places[0]
        elif key in NEEDED:
            raise DataError(
                f"{name}:1: no column {key} among: {', '.join(heading)}",
                hint=f"the heading names the columns: rung,{','.join(NEEDED)},{LOSS}, and figures",
            )
    return found


def _key(name: str) -> str:
    return name.lower().replace("_", " ")


def count_in(text: str) -> float:
    """A count such as `190M`. Raises ValueError with what is wrong."""
    try:
        value = float(parse_number(text))
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not 1 <= value < 1e18:
        raise ValueError("is no count")
    return value


def _size(cell: str, where: str) -> float:
    try:
        return count_in(cell)
    except ValueError as error:
        raise DataError(f"{where} {cell.strip()!r} {error}", hint="write 190M, 3.8B or 1e9") from None


def _figure(cell: str) -> float | None:
    """A measured figure; None for an empty cell, a text, and what is not finite."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_decayed(cell: str, where: str) -> bool:
    phase = cell.strip().lower() or POST_DECAY
    if phase not in (PRE_DECAY, POST_DECAY):
        raise DataError(f"{where}: phase {cell.strip()!r}", hint=f"write {PRE_DECAY}, {POST_DECAY} or nothing")
    return phase == POST_DECAY
