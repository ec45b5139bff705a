"""Keys of other tools with their values, converted to ours."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.not_supported import absent_names
from tuner.config.other_keys import micro_batch
from tuner.config.other_rules import PER_DEVICE, Given, Lines, Rule, made
from tuner.config.other_tools import theirs
from tuner.config.yaml import package_table


def convert(name: str, value: Any, given: Given) -> Lines | str | None:
    """Return what to write for a key of another tool, or a note in place of that; None where neither is known.

    `given` are all keys of its configuration; `processes` among them, if there, says on how many it ran.
    """
    key = name.lower().replace("-", "_")
    rule = rules().get(key)
    value = _switched(value)
    if rule is not None:
        return rule(value, given)
    ours = theirs().get(key)
    return {ours: value} if ours is not None and not isinstance(value, Mapping) else None


def _switched(value: Any) -> Any:
    """DeepSpeed's and torchtitan's sections of a switch, `{enabled: true}`, as the switch alone."""
    if isinstance(value, Mapping):
        on = [found for key, found in value.items() if key in ("enable", "enabled") and isinstance(found, bool)]
        return on[0] if on else value
    return value


@cache
def rules() -> dict[str, Rule]:
    """How the values of other tools' keys become ours; a key that is not among them keeps its value under our name."""
    return made(package_table("other_rules")) | dict.fromkeys(PER_DEVICE, micro_batch)


@cache
def known_names() -> tuple[str, ...]:
    """Every key of another tool that can be answered, those of what is not supported included."""
    return (*dict.fromkeys([*rules(), *theirs(), *absent_names()]),)
