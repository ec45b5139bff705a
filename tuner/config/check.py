"""Checks a recipe's tree once and reports everything that is wrong with it, each with its file, line and column."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tuner.config.fields import fields, find, item_fields, list_of
from tuner.config.recipe import UNIONS, Recipe
from tuner.config.rules import RULES
from tuner.config.value_types import OneOf, shown
from tuner.config.yaml import KeyPath, Node, Problems, dotted, tree_of

PLACEHOLDERS: dict[str, dict[str, Any]] = {"model": {"name_or_path": "x"}, "data": {"train": "x"}}


def check(tree: Node, problems: Problems) -> Recipe | None:
    """Return the typed recipe, and add to `problems` what is wrong; every rule that can be checked is.

    Where something is, it is the recipe without the wrong keys; None where none can be made without them.
    """
    for name in ("model", "data", *Recipe.model_fields):
        child = tree.value.get(name)
        is_blank = child is not None and child.value is None
        is_section = name not in {"version", "name", "output_dir", "seed", "hooks"}
        if is_section and (is_blank or (child is None and name in PLACEHOLDERS)):
            where = child.key_where if child is not None else tree.where
            tree.value[name] = Node({}, where, tree.base, where)
    guessed = {section for section in UNIONS if _bad_kind(tree, section, problems)}
    plain = tree.plain()
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as error:
        bad = [_report(tree, item, guessed, problems) for item in error.errors(include_url=False)]
        repaired = _repair(plain, bad)
        blamed = {dotted(path) for path in bad}
    else:
        repaired, blamed = recipe, set()
    if repaired is not None:
        _rules(tree, repaired, blamed | {f"{section}.kind" for section in guessed}, problems)
    return repaired


def _bad_kind(tree: Node, section: str, problems: Problems) -> bool:
    """Note a kind that does not exist, and take the likeliest one instead so that the rest can be checked."""
    node = tree.child(section)
    kind = node.child("kind") if node is not None else None
    kinds = UNIONS[section]
    if kind is None or (isinstance(kind.value, str) and kind.value in kinds):
        return False
    try:
        OneOf(values=tuple(kinds)).read(kind.value)
    except ValueError as error:
        meant = _meant(f"{section}.kind", kind.value)
        problems.add(kind.where, f"{section}.kind", f"got {shown(kind.value)}; {meant}" if meant else str(error))
    assert node is not None
    given = set(node.value)
    kind.value = max(kinds, key=lambda name: (len(given & set(kinds[name].model_fields)), -list(kinds).index(name)))
    return True


def _path_of(loc: tuple[str | int, ...]) -> KeyPath:
    """Drop the names of union members, which pydantic puts between a section and its keys."""
    if len(loc) > 1 and loc[0] in UNIONS and loc[1] in UNIONS[str(loc[0])]:
        return (loc[0], *loc[2:])
    if loc[:2] == ("data", "eval") and len(loc) > 2 and loc[2] in {"none", "split", "sources"}:
        return ("data", "eval", *loc[3:])
    return loc


def _report(tree: Node, error: Any, guessed: set[str], problems: Problems) -> KeyPath:
    path = _path_of(error["loc"])
    node = tree.at(path)
    exact = tree.has(path)
    is_about_key = exact if error["type"] == "extra_forbidden" else error["type"] == "missing" and not exact
    where = (node.key_where or node.where) if is_about_key else node.where
    key = "" if node.is_flag else dotted(path)
    if error["type"] == "extra_forbidden":
        if not (path[0] in guessed and find(dotted(path)) is not None):
            problems.add(where, key, _unknown(tree, path, node.is_flag))
    elif error["type"] == "missing":
        problems.add(where, dotted(path), f"missing; {_sentence(tree, path)}")
    elif error["type"] == "recipe":
        meant = _meant(dotted(path), error.get("input"))
        problems.add(where, key, f"got {shown(error.get('input'))}; {meant}" if meant else str(error["msg"]))
    else:
        problems.add(where, key, _not_a_mapping(tree, path, error.get("input")))
    return path


def _kind(tree: Node, section: str) -> str:
    """The kind of a section, the default one where none is written."""
    path = (section, "kind")
    return str(tree.at(path).value) if tree.has(path) else next(iter(UNIONS[section]))


def _sentence(tree: Node, path: KeyPath) -> str:
    """What a key that is missing means, as the kind of its section has it."""
    section = str(path[0])
    if section in UNIONS and len(path) == 2:
        return UNIONS[section][_kind(tree, section)].sentences().get(str(path[1]), "required")
    field = find(dotted(path))
    return field.sentence if field is not None else "required"


def _meant(key: str, value: Any) -> str | None:
    """What another tool's value of a key is here."""
    from tuner.config.other_tools import of_value

    return of_value(key, value)


def _unknown(tree: Node, path: KeyPath, flag: bool) -> str:
    key = dotted(path)
    field = find(key)
    if field is not None and len(path) == 1 and "." in key:  # as a flag has it
        *sections, last = key.split(".")
        nested = f"{': {'.join([*sections, last])}: VALUE{'}' * len(sections)}"
        return f"this is how a flag names it; in a recipe it is {nested}"
    if field is not None and field.kinds:
        section = str(path[0])
        kinds = [kind for kind in field.kinds if _has_its_keys(tree, section, kind)] or field.kinds
        return f"not with kind {_kind(tree, section)}; write {section}.kind: {' or '.join(kinds)}"
    from tuner.config.advice import given_in, of_unknown  # with the tables of other tools' keys

    written = tree.at(path)
    value = written.value if not isinstance(written.value, (dict, list)) else written.plain()
    return of_unknown(key, value, given_in(tree), flag)


def _has_its_keys(tree: Node, section: str, kind: str) -> bool:
    """Whether every key that a kind of a section cannot do without is written."""
    required = (name for name, info in UNIONS[section][kind].model_fields.items() if info.is_required())
    return all(name == "kind" or tree.has((section, name)) for name in required)


def _not_a_mapping(tree: Node, path: KeyPath, value: Any) -> str:
    keys = [name.rpartition(".")[2] for name in fields() if name.startswith(f"{dotted(path)}.")]
    keys = keys or list(item_fields(list_of(path)))
    allowed = f"a mapping with keys {', '.join(keys)}" if keys else "a mapping"
    kinds = UNIONS.get(str(path[0]), {})
    meant = _meant(f"{path[0]}.kind", value) if kinds and len(path) == 1 else None
    if meant:
        return f"got {shown(value)}; {meant.replace('write ', f'write {path[0]}.kind: ', 1)}"
    from tuner.config.advice import given_in, of_item
    from tuner.config.other_keys import kind_of_adapter

    is_item = isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and len(path) == 1
    if is_item and (answer := of_item(str(path[0]), value[0], given_in(tree))) is not None:
        return answer
    if path == ("model",) and isinstance(value, str):
        return f"got {shown(value)}; write model: {{name_or_path: {value}}}"
    kind = value if isinstance(value, str) and value in kinds else None
    if path == ("adapter",) and kind == "lora":  # other tools say by a key beside it that it is DoRA
        kind = kind_of_adapter(given_in(tree))
    hint = f"; write {path[0]}: {{kind: {kind}}}" if kind is not None else ""
    return f"got {shown(value)}; allowed: {allowed}{hint}"


def _repair(plain: Any, bad: list[KeyPath]) -> Recipe | None:
    """Build a recipe without the wrong keys, for the rules between the others; None when that is not possible."""
    tree = tree_of(plain, "", Path())
    for path in sorted(bad, key=lambda item: [str(part).zfill(6) for part in item], reverse=True):
        tree.remove(path)
    repaired = tree.plain()
    for section, values in PLACEHOLDERS.items():
        repaired[section] = values | (repaired.get(section) or {})
        if not repaired[section].get("train", True):
            repaired[section]["train"] = "x"
    try:
        return Recipe.model_validate(repaired)
    except ValidationError:
        return None


def _rules(tree: Node, recipe: Recipe, blamed: set[str], problems: Problems) -> None:
    given = {dotted(path[:depth]) for path, _ in tree.leaves() for depth in range(1, len(path) + 1)}
    above = {bad[:end] for bad in blamed for end, letter in enumerate(f"{bad}.") if letter == "."}
    below = tuple(f"{bad}." for bad in blamed)
    for rule in RULES:
        if any(key in above or f"{key}.".startswith(below) for key in rule.keys):
            continue
        if (text := rule.check(recipe, given)) is not None:
            key = next((name for name in rule.keys if name in given), rule.keys[0])
            problems.add(tree.at(tuple(key.split("."))).where, key, text)
