"""What an error says about a key that does not exist: what was meant, the line to write, or what there is."""

from collections.abc import Mapping
from copy import deepcopy
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from pydantic import ValidationError

from tuner.config.fields import Field, fields, find, item_fields
from tuner.config.other_data import unread
from tuner.config.other_keys import builder, convert, kind_of_adapter, known_names, no_adapter
from tuner.config.other_methods import is_taught, kind_of
from tuner.config.other_tools import absent, foreign, of_value, ours, section_of, theirs
from tuner.config.recipe import ITEMS, UNIONS, Recipe
from tuner.config.rules import RULES
from tuner.config.section import Section
from tuner.config.yaml import Node, dotted, flow

NEAR = 0.75
"""Likeness from which on a name counts as a misspelt one; below it a suggestion would be a guess."""
SURE = 0.9
"""Likeness from which on it is one even where another tool has a key of that name."""
_KINDS_OF_ADAPTERS = {
    "use_peft", "finetuning_type", "train_type", "tuner_type", "sft_type", "full_finetuning", "peft",
}  # fmt: skip
_TRAINED_WHOLE = "unknown; all weights are trained, so it changes nothing; leave it out"
_NAMES_A_KIND = {"type", "name", "kind", "_target_", "_component_", "class"}
_NAMED_BY = {"optimizer": "optim", "schedule": "lr_scheduler_type", "method": "stage"}
"""Sections of ours, and a key of another tool by which their kind is named."""
RULES_OF_SIZES = "ladder."
"""Keys that nobody means who writes `lr` or `decay` alone: those of one run have such names."""


def of_unknown(key: str, value: Any = None, given: Mapping[str, Any] | None = None, as_flags: bool = False) -> str:
    """Return what to say about a dotted key that is no key of the recipe, given its value and all that is written.

    In this order: a misspelt key of the same place, what is not supported, a key of another tool with the lines to
    write for this very value, a key of another place, a misspelt one of these; and else the keys there are.
    """
    section, _, name = key.rpartition(".")
    name = name.lower().replace("-", "_")
    here = _names_in(section)
    dashes = "--" if as_flags else ""
    if section in UNIONS and name in _NAMES_A_KIND:
        named = _of_inner(section, name, value, given or {})
        kinds = f"unknown; its counterpart here is {section}.kind: {' or '.join(UNIONS[section])}"
        return named if isinstance(named, str) else _line(named, given or {}, as_flags) if named else kinds
    if key in known_names() and section:
        return _of_other_tool(key, value, given or {}, as_flags)
    foreign = absent(name) is not None or name in known_names()
    sure = bool(section) or isinstance(value, Mapping)  # a value at the top is no section of ours
    near = _nearest(name, here, SURE if foreign and sure else NEAR if not foreign else 1.0)
    if near is not None and (not foreign or _is_misspelt(name, near)):
        if not section and isinstance(value, Mapping):
            return _of_one(near, name, value, given or {}, as_flags) or f"unknown; {choices(f'{near}.{name}')}"
        return f"unknown; did you mean {dashes}{f'{section}.{near}' if section else near}?"
    if foreign:
        return _of_other_tool(name, value, given or {}, as_flags)
    found = _elsewhere(section, name)
    answer = _of_one(found[0], name, value, given or {}, as_flags) if len(found) == 1 and value is not None else None
    if answer is not None:
        return answer
    if found:
        return f"unknown; did you mean {_either([f'{dashes}{item}' for item in found])}?"
    lists = sorted(ITEMS, key=lambda item: item != section)  # the list that is written, before others with such a key
    if (listed := next((item for item in lists if name in item_fields(item)), None)) is not None and section:
        if as_flags:
            written = "VALUE" if value is None else _quoted(flow(value))
            return f"unknown; it belongs to an item of {listed}; write --{listed}.0.{name} {written}"
        return f"unknown; it belongs to an item of {listed}; write {listed}: [{_item(listed, name, value)}]"
    similar = next((item for item in get_close_matches(name, known_names(), 3, 0.87) if _is_misspelt(name, item)), None)
    if similar is not None:
        return _of_other_tool(similar, value, given or {}, as_flags)
    return f"unknown; {choices(key)}"


def _of_one(key: str, name: str, value: Any, given: Mapping[str, Any], as_flags: bool) -> str | None:
    """What to say where one key of ours is meant, for the value that is written; None where that says nothing."""
    if isinstance(value, Mapping) and not any(item.startswith(f"{key}.") for item in fields()):
        value = next((value[switch] for switch in ("enable", "enabled") if isinstance(value.get(switch), bool)), value)
    if any(item.startswith(f"{key}.") for item in fields()):
        return _of_whole(key, value, given, as_flags) if isinstance(value, Mapping) else None
    same = key.rpartition(".")[2] == name
    if fits({key: value}) and refused(completed(in_items({key: value}, given), given), given) is None:
        return _line({key: value}, given, as_flags) if same else None
    meant = of_value(key, value)
    if meant is not None:
        return f"unknown; {meant.replace('write ', f'write {key}: ', 1)}"
    if (field := find(key)) is None or not (same or isinstance(value, Mapping)):
        return None
    return f"unknown; its counterpart here is {key}: {field.allowed}"


def _is_misspelt(name: str, known: str) -> bool:
    """Whether a name is another one with a slip in it: word for word alike."""
    words, others = name.split("_"), known.split("_")
    return len(words) == len(others) and all(
        SequenceMatcher(None, one, other).ratio() >= NEAR for one, other in zip(words, others, strict=True)
    )


def choices(key: str) -> str:
    """Return, in words, the keys that may stand where an unknown one does."""
    section = key.rpartition(".")[0]
    here = [item.rpartition(".")[2] for item in fields() if item.rpartition(".")[0] == section]
    if section and here:
        return f"{section} has {', '.join(here)}"
    return f"a recipe has {', '.join(dict.fromkeys(item.split('.')[0] for item in fields()))}"


def lines(values: Mapping[str, Any], as_flags: bool = False) -> str:
    """Our keys with their values as they are written: `train.duration: 3 epochs`, or as flags."""
    if as_flags:
        return " ".join(f"--{key} {_quoted(flow(value))}" for key, value in values.items())
    return " and ".join(f"{key}: {flow(value)}" for key, value in values.items())


def fits(values: Mapping[str, Any]) -> bool:
    """Whether every value may be written under its key; keys that do not exist yet are taken as they are."""
    for key, value in values.items():
        field = find(key)
        if field is None or field.value_type is None:
            continue
        try:
            field.value_type.check(value)
        except ValueError:
            return False
    return True


def _of_other_tool(name: str, value: Any, given: Mapping[str, Any], as_flags: bool) -> str:
    """What is here for a key of another tool: the lines for its value where this can be converted."""
    if (feature := absent(name)) is not None:
        return feature.sentence
    if value is None and as_flags:
        return f"unknown; did you mean --{ours(name)}?" if ours(name) else f"unknown; {choices(name)}"
    converted = convert(name, value, given)
    if converted is None and isinstance(value, Mapping):
        return _of_whole(section_of(name), value, given, as_flags) or _counterpart(name)
    if isinstance(converted, str):
        return converted if converted.startswith("not supported") else f"unknown; {converted}"
    if converted is None:
        return _counterpart(name)
    if any(key.startswith("adapter.") for key in converted) and no_adapter(given) and name not in _KINDS_OF_ADAPTERS:
        return _TRAINED_WHOLE
    if converted.get("adapter.kind") == "lora":
        converted = converted | {"adapter.kind": kind_of_adapter(given)}
    left = [f"{key}: {flow(found)}" for key, found in unread(value).items()] if "data.train" in converted else []
    lost = f"; has no counterpart: {', '.join(left)}" if left else ""
    return _line(converted, given, as_flags, theirs().get(name)) + lost


def _line(found: Mapping[str, Any], given: Mapping[str, Any], as_flags: bool, key: str | None = None) -> str:
    """Ask for lines that a recipe takes; where it does not, say what they would be and what it says against them."""
    if not found:
        return f"unknown; this value of it changes nothing{f' in {key}' if key else ''}; leave it out"
    if not fits(found):
        return _counterpart(next(key for key, value in found.items() if not fits({key: value})))
    whole = in_items(found, given)
    if any(find(key) is None for key in whole):
        return f"unknown; here it is a key of an item of data.train: {lines(found)}"
    whole = completed(whole, given)
    if (against := refused(whole, given)) is not None:
        return f"unknown; here it is {lines(whole, as_flags)}, but: {against}"
    needs = ", which needs held-out rows: data.eval" if needs_rows(whole, given) else ""
    return f"unknown; write {lines(whole, as_flags)}{needs}"


def _counterpart(name: str) -> str:
    """The key of ours, under its name or another tool's, where the value is not understood, with what it takes."""
    key = theirs().get(name, name if find(name) is not None else None)
    field = find(key.replace("data.train.", "data.train.0.")) if key is not None else None
    if key is None or field is None:
        return f"unknown; {choices(name)}"
    return f"unknown; its counterpart here is {key}: {field.allowed}"


def _of_whole(section: str, found: Mapping[str, Any], given: Mapping[str, Any], as_flags: bool) -> str | None:
    """What the keys of another tool's section become together; None where none of them becomes anything."""
    result, left = _of_section(section, found, {**given, **found})
    if no_adapter({**given, **found}):
        result = {key: value for key, value in result.items() if not key.startswith(("adapter.", "model.quantize"))}
        if not result and not left:
            return _TRAINED_WHOLE
    line = _line(result, given, as_flags) if result else "unknown"
    return "; ".join([line, *left]) if result or any(": " in item for item in left) else None


def of_item(section: str, found: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """The same of a section that is a list of one mapping in another tool, as ArcticTraining's `checkpoint` is."""
    line = _of_whole(section, {name: value for name, value in found.items() if name != "type"}, given, False)
    return line.replace("unknown", "got a list", 1) if line else None


def _of_section(section: str, found: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same, under the name that the section has here, and what is not among them."""
    result: dict[str, Any] = {}
    left: list[str] = []
    for name, value in found.items():
        converted = _of_inner(section, str(name), value, given)
        if isinstance(converted, dict):
            result |= converted
        else:
            left.append(f"{name}: {converted}" if converted else f"{name} has no counterpart")
    return result, left


def _of_inner(section: str, name: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | str | None:
    """What a key of another tool's section becomes: one of ours of that name, or what it is anywhere else."""
    if name in _NAMES_A_KIND and section in UNIONS:
        word = str(value).rpartition(".")[2].lower()
        return builder(value, given) if name == "_component_" else convert(_NAMED_BY.get(section, ""), word, given)
    key = f"{section}.{name}"
    if find(key) is not None and fits({key: value}):
        return {key: value}
    if (feature := absent(name)) is not None:
        return feature.sentence
    converted = convert(name, value, given)
    if converted is None and isinstance(value, Mapping):
        return _of_section(section_of(name), value, given)[0] or None
    return converted if not isinstance(converted, dict) or fits(converted) else None


def in_items(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of an item of `data.train` as the list with that item, where the recipe names one source."""
    inner = {key.removeprefix("data.train."): value for key, value in values.items() if key.startswith("data.train.")}
    if not inner:
        return dict(values)
    named = given.get("data.train", given.get("data.train.0.path", given.get("data.train.0")))
    if not isinstance(named, str) or "data.train.1" in given or "data.train.1.path" in given:
        return dict(values)
    rest = {key: value for key, value in values.items() if not key.startswith("data.train.")}
    return rest | {"data.train": [{"path": named} | inner]}


def _names_in(section: str) -> list[str]:
    """The keys that may stand at a place: those of a section, or of an item of a list of sections."""
    listed = next((item for item in ITEMS if section == item or section.startswith(f"{item}.")), None)
    if listed is not None and section != listed:
        return list(item_fields(listed))
    here = [item.rpartition(".")[2] for item in fields() if item.rpartition(".")[0] == section]
    return here if section else [*here, *dict.fromkeys(item.split(".")[0] for item in fields() if "." in item)]


def _elsewhere(section: str, name: str) -> list[str]:
    """Keys of that very name in other places; of a misspelt section; of another tool's section; misspelt elsewhere."""
    table = {key: field for key, field in fields().items() if not key.startswith(RULES_OF_SIZES)}
    tops = list(dict.fromkeys(item.split(".")[0] for item in table if "." in item))
    if not section and section_of(name):
        return [section_of(name)]
    if section and section not in tops:
        meant = section_of(section) or _nearest(section, tops)
        if meant is not None and (near := _nearest(name, _names_in(meant))) is not None:
            return [f"{meant}.{near}"]
    same = [item for item in table if item.rpartition(".")[2] == name and (not section or name != "name")]
    if same:
        return same[:3]
    like = get_close_matches(name, [item.rpartition(".")[2] for item in table], 1, 0.85) if len(name) > 3 else []
    return [item for item in table if item.rpartition(".")[2] in like][:3]


def _nearest(name: str, names: list[str], likeness: float = NEAR) -> str | None:
    close = get_close_matches(name, names, 1, likeness)
    if close:
        return close[0]
    return next((item for item in names if len(item) <= 2 and len(name) <= 3 and set(item) <= set(name)), None)


def _item(listed: str, name: str, value: Any) -> str:
    section: type[Section] = ITEMS[listed].section
    first = next(iter(section.model_fields))
    shown = "..." if value is None else flow(value)
    return f"{{{first}: ...}}" if first == name else f"{{{first}: ..., {name}: {shown}}}"


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _quoted(text: str) -> str:
    return f"'{text}'" if any(char in text for char in ' [{*$"') else text


def given_in(tree: Node) -> dict[str, Any]:
    """Every scalar that is written, by its dotted key and the last name of it: what another tool's key depends on."""
    found: dict[str, Any] = {}
    for name, child in tree.value.items():  # whole lists and sections of other tools
        if name not in Recipe.model_fields and isinstance(child.value, (list, dict)):
            found[name] = child.plain()
    for path, node in tree.leaves():
        found[dotted(path)] = node.value
        if path and isinstance(path[-1], str):
            found.setdefault(path[-1].lower().replace("-", "_"), node.value)
    return found


_HELD_OUT = ("eval.", "checkpoint.keep_best", "ema.evaluate")
_BASE: dict[str, Any] = {"model": {"name_or_path": "owner/name"}, "data": {"train": "rows.jsonl", "eval": "held.jsonl"}}
_IMPLIED: dict[str, dict[str, Any]] = {
    "train.offload_activations": {"train.gradient_checkpointing": "full"}, "optimizer.rounding": {"model.dtype": "bf16"}
}
"""Keys whose value, other than the default, needs another one."""


def completed(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lines with those that they need: the kind of a section that has such keys, and values that go together."""
    found = dict(values)
    for section in UNIONS:
        inside = (find(key) for key in values if key.startswith(f"{section}."))
        kinds = [field.kinds for field in inside if field is not None and field.kinds]
        if kinds and f"{section}.kind" not in found:
            kind = _kind(section, kinds, given)
            found = {f"{section}.kind": kind} | found if kind else found
    if "model.quantize" in found and found.get("adapter.kind", given.get("adapter.kind")) not in {"lora", "dora"}:
        found = {"adapter.kind": kind_of_adapter(given)} | found
    for key, needed in _IMPLIED.items():
        if key in found and found[key] not in (False, "auto", "nearest") and not needed.keys() & given.keys():
            found |= {name: value for name, value in needed.items() if name not in found}
    return found


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
    said = (rule.check(recipe, written) for rule in RULES if concerned & set(rule.keys))
    return next(filter(None, said), None)


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
        if any(name in given for name in foreign()[key]):
            own.setdefault(key, value)
    return own


def _goes_with(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a key may stay where a section takes another kind."""
    section, field = key.partition(".")[0], find(key)
    kind = values.get(f"{section}.kind")
    return kind is None or field is None or not field.kinds or kind in field.kinds
