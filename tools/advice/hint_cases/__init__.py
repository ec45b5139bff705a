"""How each advice comes about, and what it means: the cases are in the YAML files here, one for each part of `tuner`.

A file has `cases`, and may have a `recipe` that all of its cases are written over. What `change` may name is in
`tools/changes.py`, what `start` may be in `tools/advice/hint_starts.py`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.advice.hint_sites import Site, sites
from tools.advice.hint_words import Way
from tools.tables import read_table

DIRECTORY = Path(__file__).resolve().parent
CHEAP = ("rows", "prepared", "teacher")
"""What a case may start from in every run of the tests."""


@dataclass(frozen=True)
class Case:
    """How an advice comes about, and what it means.

    `recipe` is written over the base, `start` names what is there, each of `change` does something to it (a name, or a
    name and its arguments), and `words` is the command line. `meant` are the ways that the advice is to propose, one by
    one, as they follow from the documents. `reading` has what a reader puts for a placeholder, or takes a phrase for. A
    command that is proposed is run before the command line, or `instead` of it; with `onward`, in what that has left.
    What is followed `ends` with this exit code.
    """

    site: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    meant: Sequence[Way] = ()
    words: str = "config check r.yaml"
    start: str = "rows"
    change: Sequence[str | Mapping[str, Any]] = ()
    reading: Mapping[str, str] = field(default_factory=dict)
    instead: bool = False
    onward: bool = False
    ends: int = 0
    dear: bool = False

    @property
    def is_dear(self) -> bool:
        """Whether it costs much: it trains or builds a model, or what it starts from has."""
        return self.dear or self.start not in CHEAP

    @property
    def sites(self) -> list[Site]:
        """The places in the sources that it is about."""
        exact = [site for site in sites() if site.name == self.site]
        return exact or [site for site in sites() if site.name.startswith(self.site)]


@functools.cache
def read(name: str) -> dict[str, Any]:
    """One of the files."""
    content: dict[str, Any] = read_table(DIRECTORY / f"{name}.yaml")
    return content


def cases() -> list[Case]:
    """All of them, of one file after the other."""
    files = [read(path.stem) for path in sorted(DIRECTORY.glob("*.yaml"))]
    return [
        Case(**{**case, "recipe": {**file.get("recipe", {}), **case.get("recipe", {})}})
        for file in files
        for case in file["cases"]
    ]
