"""What other tools call our keys and the values of these: other_tools.yaml, printed in docs/coming-from.md."""

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from tuner.config.not_supported import sentence
from tuner.config.yaml import package_table

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


def values_written(key: str, text: str) -> list[str]:
    """The values of other tools in whose place `text` is written for our key."""
    return str(package_table("other_tools")["write"][key][text]).split()


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
