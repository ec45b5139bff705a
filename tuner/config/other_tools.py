"""What other tools call our keys and the values of these, and what they have that is not here, with the way to it.

The tables are `other_tools.yaml` and `not_supported.yaml`, which docs/coming-from.md and docs/not-supported.md print.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

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


T = TypeVar("T")


def by_name(rows: Mapping[str, T]) -> dict[str, T]:
    """A table of which a key holds several names, separated by spaces, by each of its names."""
    return {name: row for names, row in rows.items() for name in names.split()}


def _inverted(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: key for key, names in rows.items() for name in names.split()}


@cache
def _by_their_names(table: str) -> dict[str, str]:
    return _inverted(package_table("other_tools")[table])


@cache
def foreign() -> dict[str, tuple[str, ...]]:
    """Our keys with the names that other tools have for them."""
    return {ours: tuple(names.split()) for ours, names in package_table("other_tools")["names"].items()}


def theirs() -> dict[str, str]:
    """Names of other tools with our keys: in lower case, `-` as `_`."""
    return _by_their_names("names")


def section_of(name: str) -> str:
    """Our section for another tool's; empty where it is none."""
    return _by_their_names("sections").get(name, "")


def ours(name: str) -> str | None:
    """Return our name, or the whole thing to write, for a key of another tool; None when it is not in the table."""
    key = name.lower().replace("-", "_")
    return _by_their_names("notes").get(key) or theirs().get(key)


@cache
def other_values() -> dict[str, dict[str, str]]:
    """Our key -> another tool's value in lower case -> what an error says of it."""
    tables = package_table("other_tools")
    found = {
        key: {value: f"write {text}" for value, text in _inverted(rows).items()}
        for key, rows in tables["write"].items()
    }
    found["optimizer.kind"] |= {
        name: f"not supported: {name}; instead write adamw, adafactor or muon, or custom for one of your own"
        for name in tables["no_optimizer"].split()
    }
    for key, rows in tables["refused"].items():
        found[key] |= {value: sentence(feature) for value, feature in _inverted(rows).items()}
    return found


def of_value(key: str, value: object) -> str | None:
    """What to say of a value of one of our keys, items of lists included; None where it is no other tool's."""
    plain = ".".join(part for part in key.split(".") if not part.isdecimal()).replace("data.eval.", "data.train.")
    if not isinstance(value, (str, bool, int, float, type(None))):
        return None
    text = "none" if value is None else str(value).strip().lower()
    known = other_values().get(plain, {})
    return known.get(text.replace(" ", "_").replace("-", "_")) or known.get(text)
