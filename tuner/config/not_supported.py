"""What other tools have and `tuner` has not, with what to write instead: the table of docs/not-supported.md."""

from dataclasses import dataclass
from functools import cache

from tuner.config.yaml import package_table


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
    """Every feature, by topic."""
    return tuple(Absent(topic, **row) for topic, rows in package_table("not_supported").items() for row in rows)


@cache
def absent_names() -> dict[str, Absent]:
    """The same by key."""
    return {name: feature for feature in absent_features() for name in feature.names.split()}


def absent(name: str) -> Absent | None:
    """The feature that a key of another tool asks for and that is not here; None where it is no such key."""
    return absent_names().get(name.lower().replace("-", "_"))


def sentence(name: str) -> str:
    """What is said of a key that is among them. Raises KeyError for another one."""
    return absent_names()[name].sentence
