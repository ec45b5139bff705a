"""Lines that an answer proposes, tried in a recipe first: what else they need, and what it says against them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pydantic import ValidationError

from tuner.config.fields import Field, fields, find
from tuner.config.other_keys import kind_of_adapter
from tuner.config.other_methods import is_taught, kind_of
from tuner.config.other_tools import FOREIGN
from tuner.config.recipe import UNIONS, Recipe
from tuner.config.rules import rules_of

_HELD_OUT = ("eval.", "checkpoint.keep_best", "ema.evaluate")
_BASE: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl", "eval": "held.jsonl"}}
_IMPLIED: dict[str, dict[str, Any]] = {
    "train.offload_activations": {"train.gradient_checkpointing": "full"},
    "optimizer.rounding": {"model.dtype": "bf16"},
}
"""Keys whose value, other than the default, needs another one."""


def completed(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lines with those that they need: the kind of a section that has such keys, and values that go together."""
    found = dict(values)
    for section in UNIONS:
        inside = [field for key in values if key.startswith(f"{section}.") and (field := find(key)) is not None]
        kinds = [field.kinds for field in inside if field.kinds]
        if kinds and f"{section}.kind" not in found:
            kind = _kind(section, kinds, given)
            found = {f"{section}.kind": kind} | found if kind else found
    if "model.quantize" in found and not _has_adapter(found, given):
        found = {"adapter.kind": kind_of_adapter(given)} | found
    for key, needed in _IMPLIED.items():
        if key in found and found[key] not in (False, "auto", "nearest") and not needed.keys() & given.keys():
            found |= {name: value for name, value in needed.items() if name not in found}
    return found


def _has_adapter(found: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return found.get("adapter.kind", given.get("adapter.kind")) in {"lora", "dora"}


def _kind(section: str, kinds: list[tuple[str, ...]], given: Mapping[str, Any]) -> str | None:
    """The kind of a section that has all of some keys; None where the one that is written, or the default, has them."""
    able = [kind for kind in kinds[0] if all(kind in others for others in kinds)]
    now = str(given.get(f"{section}.kind", next(iter(UNIONS[section]))))
    implied = kind_of_adapter(given) if section == "adapter" else None
    if section == "method":
        implied = "distill" if is_taught(given) else kind_of(given)
    if implied in able and now != implied:
        return implied
    return None if now in able or not able else able[0]


def needs_rows(values: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a recipe with these lines still has to name held-out rows."""
    wanted = any(key.startswith(_HELD_OUT) and value not in ("never", False, None) for key, value in values.items())
    return wanted and not any(key.startswith("data.eval") for key in (*values, *given))


def refused(values: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """What a recipe that has these lines says against them; None where it takes them."""
    own = {key: value for key, value in _own(given).items() if _goes_with(key, values)}
    tree = deepcopy(_BASE)
    for key, value in {**own, **values}.items():
        *sections, name = key.split(".")
        owner = tree
        for section in sections:
            if not isinstance(owner.get(section), dict):
                owner[section] = {}
            owner = owner[section]
        owner[name] = value
    concerned = {*values, *(key.removesuffix(".kind") for key in values if key.endswith(".kind"))}
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        return next((_said(item) for item in error.errors(include_url=False) if _concerns(item, concerned)), None)
    written = {"model", "data", "data.train", "data.eval", *own, *values}
    for rule in rules_of(written):
        if concerned & set(rule.keys) and (text := rule.check(recipe, written)) is not None:
            return text
    return None


def _concerns(error: Any, keys: set[str]) -> bool:
    """Whether an error of pydantic's is at one of some keys, or inside; kinds of a section are among its places."""
    kinds = UNIONS.get(str(error["loc"][0]), {})
    place = ".".join(str(part) for part in error["loc"] if part not in kinds)
    return any(place == key or place.startswith(f"{key}.") or key.startswith(f"{place}.") for key in keys)


def _said(error: Any) -> str:
    place = str(error["loc"][-1])
    return {"missing": f"{place} is missing", "extra_forbidden": f"{place} is not of this kind"}.get(
        error["type"], str(error["msg"])
    )


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is written beside them under keys of ours."""
    known: dict[str, Field] = fields()
    own = {key: value for key, value in given.items() if "." in key and key in known and value is not None}
    for key, value in (("optimizer.lr", 0.001), ("method.teacher", "owner/teacher")):  # said by another tool's key
        if any(name in given for name in FOREIGN[key]):
            own.setdefault(key, value)
    return own


def _goes_with(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a key may stay where a section takes another kind."""
    section, field = key.partition(".")[0], find(key)
    kind = values.get(f"{section}.kind")
    return kind is None or field is None or not field.kinds or kind in field.kinds
