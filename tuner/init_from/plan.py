"""What a model is given, entry by entry: which tensor of which source goes where, and what is unclear about it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tuner.config.recipe import InitFrom
from tuner.init_from.sources import WeightSource
from tuner.init_from.target import InitTarget, TargetTensor

KEY = "model.init_from"
How = Literal["whole", "rows", "assembled", "merged"]
SHOWN = 3


@dataclass(frozen=True)
class Unclear:
    """Why an entry is refused: the key to blame, what is wrong, and what to write."""

    key: str
    message: str
    hint: str | None = None


@dataclass(frozen=True)
class Gift:
    """What a place gets: a tensor, the first rows of it, one made of several, or what an adapter adds to it.

    ``names`` are the tensors in the source; of an adapter A, B and, with DoRA, the lengths.
    """

    entry: int
    place: TargetTensor
    how: How
    names: tuple[str, ...]


@dataclass
class Matched:
    """What one entry gives, and what of it does not."""

    number: int
    entry: InitFrom
    source: WeightSource
    gifts: list[Gift] = field(default_factory=list)
    renames: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By the glob of `rename`, names there and here."""
    unexpected: list[str] = field(default_factory=list)
    not_chosen: list[str] = field(default_factory=list)
    twins: list[str] = field(default_factory=list)
    """Second copies of tied weights."""
    missing: list[str] = field(default_factory=list)
    """Places that a source which was taken whole has nothing for."""
    problems: list[Unclear] = field(default_factory=list)

    def refuse(self, message: str, hint: str | None = None, key: str | None = None) -> None:
        """Note what is unclear, about the entry or one of its keys."""
        self.problems.append(Unclear(f"{KEY}.{self.number}" + (f".{key}" if key else ""), message, hint))


@dataclass(frozen=True)
class InitPlan:
    """What a model is given before its first step: every entry's gifts, of which later ones win."""

    target: InitTarget
    entries: tuple[Matched, ...]
    gifts: tuple[Gift, ...]
    """Those that count, in order: none that a later one replaces whole."""

    def source(self, number: int) -> WeightSource:
        """That of the entry with this number."""
        return next(one.source for one in self.entries if one.number == number)

    def shape(self, gift: Gift) -> tuple[int, ...]:
        """That of a place, or of its first rows where no others are given."""
        return self.source(gift.entry).tensors[gift.names[0]].shape if gift.how == "rows" else gift.place.shape

    @property
    def kept(self) -> list[TargetTensor]:
        """The places that stay as they were."""
        given = {gift.place.name for gift in self.gifts}
        return [place for name, place in self.target.places.items() if name not in given]


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
