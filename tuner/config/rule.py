"""What a rule between fields of the recipe is."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe


@dataclass(frozen=True)
class Rule:
    """A check of several keys; it is skipped when one of `keys` is itself wrong. `keys[0]` is blamed."""

    keys: tuple[str, ...]
    check: Callable[[Recipe, Set[str]], str | None]
    """What is wrong, if anything, with a recipe in which these keys are written."""
