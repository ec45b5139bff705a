"""Every key of the recipe as one flat table: what it allows, its sentence, its default, and where it applies.

And as the recipe's JSON schema, for editors and other programs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from tuner.config.numbers import Duration
from tuner.config.recipe import ITEMS, UNIONS, Recipe
from tuner.config.section import Section
from tuner.config.value_types import OneOf, Table, Text, ValueType


@dataclass(frozen=True)
class Field:
    """One key: `kinds` are those of its section that have it (empty: all); a list of sections has no `value_type`."""

    key: str
    sentence: str
    default: Any
    value_type: ValueType | None
    required: bool = False
    kinds: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    """Kinds whose default is another one, with it as people write it."""

    @property
    def section(self) -> str:
        """The section's name; empty for a key at the top."""
        return self.key.rpartition(".")[0]

    @property
    def allowed(self) -> str:
        """What may be written, in words."""
        return self.value_type.allowed if self.value_type is not None else ITEMS[self.key].allowed

    @property
    def takes_text(self) -> bool:
        """Whether a value on the command line is used as it stands, not read as YAML."""
        return isinstance(self.value_type, Text) or self.value_type is None

    @property
    def default_text(self) -> str:
        """The default as people write it."""
        if self.required:
            return "required"
        value = self.value_type.write(self.default) if self.value_type is not None else self.default
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(str(item) for item in value)}]"
        if isinstance(value, float):
            return f"{value:g}"
        return "null" if value is None else str(value)


@cache
def fields() -> dict[str, Field]:
    """Return every key of the recipe in its order, those of list items excepted."""
    table: dict[str, Field] = {}
    _add_section(table, "", Recipe)
    return table


def _add_section(table: dict[str, Field], above: str, section: type[Section]) -> None:
    """Add the keys of a section, and those of the sections inside it."""
    own = _fields_of(section, above)
    for name, info in section.model_fields.items():
        key = f"{above}{name}"
        if key in UNIONS:
            for kind, member in UNIONS[key].items():
                _add_member(table, key, kind, member)
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            _add_section(table, f"{key}.", info.annotation)
        else:
            table[key] = own[name]


@cache
def item_fields(key: str) -> dict[str, Field]:
    """Return the keys of one item of a list of sections, such as those of data.train; empty for another key."""
    items = ITEMS.get(key)
    return _fields_of(items.section) if items else {}


def list_of(path: tuple[str | int, ...]) -> str:
    """Return the key of the list of sections that a path leads into, such as data.train; else an empty text."""
    return next((key for key in ITEMS if path[: key.count(".") + 1] == tuple(key.split("."))), "")


def _fields_of(section: type[Section], above: str = "") -> dict[str, Field]:
    sentences, keys = section.sentences(), section.model_fields.items()
    return {key: _field(f"{above}{key}", info, sentences.get(key, "")) for key, info in keys}


def _field(key: str, info: FieldInfo, sentence: str) -> Field:
    default = None if info.is_required() else info.default
    kind = next((item.of(info.annotation) for item in info.metadata if isinstance(item, ValueType)), None)
    return Field(key, sentence, default, kind, info.is_required())


def _add_member(table: dict[str, Field], section: str, kind: str, member: type[Section]) -> None:
    for key, field in _fields_of(member, f"{section}.").items():
        if key == "kind":
            kinds = tuple(UNIONS[section])
            table[field.key] = Field(field.key, field.sentence, kinds[0], OneOf(values=kinds))
        else:
            table[field.key] = _joined(table.get(field.key), field, kind)
    for name, field in table.items():
        if field.section == section and len(field.kinds) == len(UNIONS[section]):
            table[name] = replace(field, kinds=())


def _joined(before: Field | None, field: Field, kind: str) -> Field:
    """The field of a key that another kind has too: the first kind that has it describes it."""
    if before is None:
        return replace(field, kinds=(kind,))
    differs = field.default_text != before.default_text
    others = (*before.others, (kind, field.default_text)) if differs else before.others
    return replace(before, kinds=(*before.kinds, kind), others=others)


def find(key: str) -> Field | None:
    """Return the field of a dotted key; items of lists and free mappings (`model.config.x`) are found too."""
    parts = key.split(".")
    table, rest, listed = fields(), parts, list_of(tuple(parts))
    if listed and len(parts) > (depth := listed.count(".") + 1) and parts[depth].isdecimal():
        table = item_fields(listed)
        rest = parts[depth + 1 :] or [next(iter(table))]
    for depth in range(1, len(rest)):
        owner = table.get(".".join(rest[:depth]))
        if owner is not None and isinstance(owner.value_type, Table):
            return Field(key, owner.sentence, None, owner.value_type)
    return table.get(".".join(rest))


def _sections(above: type[Section]) -> Iterator[type[Section]]:
    for section in above.__subclasses__():
        yield section
        yield from _sections(section)


class _Schema(GenerateJsonSchema):
    """Writes defaults as people write them."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Duration):
            return str(dft)
        if isinstance(dft, tuple) and dft and isinstance(dft[0], Duration):
            return str(dft[0]) if len(dft) == 1 else [str(item) for item in dft]
        if hasattr(dft, "model_dump"):
            return dft.model_dump(mode="json")
        return super().encode_default(dft)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe."""
    schema = Recipe.model_json_schema(schema_generator=_Schema)
    for section in _sections(Section):
        definition = schema if section is Recipe else schema["$defs"].get(section.__name__, {})
        for key, sentence in section.sentences().items():
            if key in definition.get("properties", ()):
                definition["properties"][key]["description"] = sentence
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
