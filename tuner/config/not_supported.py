"""What other tools have and `tuner` has not, with what to write instead: the table of docs/not-supported.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Absent:
    """A feature by the keys that ask for it elsewhere, and the way to the same end here."""

    topic: str
    """Heading in the documents."""
    names: str
    """Keys of other tools, separated by spaces, in lower case with underscores."""
    what: str
    instead: str
    needed: bool = True
    """Whether its users lose something: false for what happens here without a key."""

    @property
    def sentence(self) -> str:
        """What an error says about one of its keys."""
        if self.needed:
            return f"not supported: {self.what}; instead {self.instead}"
        return f"not needed: {self.what}; {self.instead}"


@cache
def absent_features() -> tuple[Absent, ...]:
    """Every feature, by topic. Read when it is first asked for: most recipes have no unknown key."""
    from ruamel.yaml import YAML

    topics = YAML(typ="safe").load(_TABLE)
    return tuple(Absent(topic, **row) for topic, rows in topics.items() for row in rows)


@cache
def absent_names() -> dict[str, Absent]:
    """The same by key."""
    return {name: feature for feature in absent_features() for name in feature.names.split()}


def absent(name: str) -> Absent | None:
    """The feature that a key of another tool asks for and that is not here; None where it is no such key."""
    return absent_names().get(name.lower().replace("-", "_"))
