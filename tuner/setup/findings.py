"""The problems of a recipe that its keys alone do not show, each at the place where its key is written."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec

from tuner.config.load import LoadedRecipe
from tuner.errors import Problem, RecipeError, TunerError

P = ParamSpec("P")
_KEYED = re.compile(r"((?:[a-z_]+\.)+[a-z_0-9.]+)(?::| (?=\d)) *(.*)", re.DOTALL)


@dataclass
class Findings:
    """The problems of one recipe, each at the place where its key is written."""

    loaded: LoadedRecipe
    known: tuple[Problem, ...] = ()
    """Those of its keys, which the recipe was loaded without."""
    hint: str | None = None
    """What helps with those."""
    problems: list[Problem] = field(default_factory=list)

    def add(self, key: str, message: str, hint: str | None = None) -> None:
        """Note a problem of a key, but where one of the key itself is known."""
        if not self.sound(key):
            return
        text = f"{message}; {hint}" if hint else message
        if (problem := Problem.at(self.where(key), key, " ".join(text.split()))) not in self.problems:
            self.problems.append(problem)

    def sound(self, *keys: str) -> bool:
        """Whether no problem of the keys themselves, of what is in them or around them, is known."""
        bad = [f"{problem.key}." for problem in self.known if problem.key]
        return not any(one.startswith(f"{key}.") or f"{key}.".startswith(one) for key in keys for one in bad)

    def where(self, key: str) -> str:
        """Where a key is written, or else the nearest key around it."""
        origins = self.loaded.origins
        parts = key.split(".")
        for depth in range(len(parts), 0, -1):
            name = ".".join(parts[:depth])
            inside = [place for other, place in origins.items() if other == name or other.startswith(f"{name}.")]
            if inside:
                return inside[0]
        return str(self.loaded.path or "recipe")

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Within, what raises becomes a problem: of the key that its message begins with, else of `key`."""
        try:
            yield
        except TunerError as error:
            named = _KEYED.fullmatch(error.message)
            self.add(*(named[1], named[2]) if named else (key, error.message), error.hint)

    def check(self, key: str, work: Callable[P, object], *args: P.args, **named: P.kwargs) -> None:
        """Do some work, whose error becomes a problem as it does within `of`."""
        with self.of(key):
            work(*args, **named)

    def has(self, section: str) -> bool:
        """Whether a section has a problem."""
        return any(problem.key.split(".")[0] == section for problem in self.problems)

    def raise_any(self) -> None:
        """Raise RecipeError with all problems, where there is one."""
        if self.known or self.problems:
            raise RecipeError.of([*self.known, *self.problems], self.hint)
