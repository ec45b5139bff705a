"""What every section of the recipe is made of, and what a rule between keys is, also as a row of a table."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import core_schema

from tuner.config.numbers import Duration
from tuner.config.value_types import Switch, Table, Text, refuse, shown
from tuner.stages import url_of

if TYPE_CHECKING:
    from tuner.config.recipe import Recipe


Where = Mapping[str, Any]
"""What the values of keys are where something is wrong: the one that is written here, null for nothing or an empty
list, one of a list, none of ``not``, a list that ``lacks`` an item, a number ``above`` that of another key, a directory
that is ``stored`` in an object store, or any that is ``changed`` from the default. Of a list of sections one is
enough."""
_NAMED = re.compile(r"\{([a-z_.]+)\}")
"""In what is said, a key whose value stands there."""


@dataclass(frozen=True)
class Rule:
    """A check of several keys; it is skipped when one of `keys` is itself wrong. `keys[0]` is blamed."""

    keys: tuple[str, ...]
    check: Callable[[Recipe, Set[str]], str | None]
    """What is wrong, if anything, with a recipe in which these keys are written."""


def table_rules(name: str) -> tuple[Rule, ...]:
    """The rules of a JSON file of this package: of each its keys, and what is said where values are so and so."""
    rows = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return tuple(Rule(tuple(row["keys"]), _check(row["wrong"])) for row in rows.values())


def _check(wrong: Mapping[str, Where | list[Where]]) -> Callable[[Recipe, Set[str]], str | None]:
    ways = [
        (says, [(key.split("."), value) for key, value in where.items()])
        for says, found in wrong.items()
        for where in (found if isinstance(found, list) else [found])
    ]

    def check(recipe: Recipe, given: Set[str]) -> str | None:
        for says, where in ways:
            if all(_holds(recipe, recipe, path, wanted) for path, wanted in where):
                return _NAMED.sub(lambda named: str(attrgetter(named[1])(recipe)), says)
        return None

    return check


def _holds(recipe: Recipe, owner: Any, path: list[str], wanted: Any) -> bool:
    """Whether the value at a path, or one of those in a list of sections, is what is wanted."""
    value = owner
    for place, name in enumerate(path):
        owner = value
        if isinstance(owner, tuple):
            return any(_holds(recipe, each, path[place:], wanted) for each in owner)
        value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
    if not isinstance(wanted, dict):
        return _is(value, wanted)
    if "stored" in wanted:
        return url_of(Path(value or "/")) is not None
    if "changed" in wanted:
        field = type(owner).model_fields.get(path[-1])  # no kind of optimizer but some has betas
        return field is not None and bool(value != field.default)
    if "above" in wanted:
        bound = attrgetter(wanted["above"])(recipe)
        return value is not None and not isinstance(bound, str) and bool(value > bound)
    return wanted["lacks"] not in value if "lacks" in wanted else not _is(value, wanted["not"])


def _is(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_is(value, one) for one in wanted)
    if wanted is None:
        return value in (None, (), {})
    return bool(value == wanted) or str(value) == wanted


Auto = Literal["auto"]
Durations = tuple[Duration, ...]
Bool = Annotated[bool, Switch()]
PLUGIN = r"(?:.+\.py:[^\W\d]\w*|(?!.*\.py$)(?!.*:)\S.*)"
Use = Annotated[str, Text(what="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)]
"""Code of the user's own."""
Options = Annotated[dict[str, Any], Table()]
"""Its keyword arguments."""


Effect = Literal["safe", "warn", "refuse"]
"""What it means for a resumed run that a key has another value (`run/changes.py`)."""


@cache
def _sentences(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of annotated names in the classes of a module."""
    found: dict[str, dict[str, str]] = {}
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for made in (each for each in body if isinstance(each, ast.ClassDef)):
        for pair in pairwise(made.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(made.name, {})[key] = inspect.cleandoc(text)
    return found


class Section(BaseModel):
    """A frozen part of the recipe that knows its keys and refuses others."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
    on_resume: ClassVar[Mapping[str, Effect]] = {}
    """What a change of a key means for a resumed run, where that differs from what it means for those above it."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What the section cannot be together with other keys."""

    @classmethod
    def sentences(cls) -> dict[str, str]:
        """Each key's sentence, the docstring below it, or that of the class above which has it.

        Read when it is asked for: pydantic's own `use_attribute_docstrings` reads the source of each class as it is
        made, a sixth of the time that importing the recipe takes each command.
        """
        found: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            if issubclass(each, Section):
                found |= _sentences(each.__module__).get(each.__name__, {})
        return found | {key: info.description for key, info in cls.model_fields.items() if info.description}

    @property
    def is_on(self) -> bool:
        """Whether there is what the section is about; a whole recipe that is written out goes without others."""
        return True


@dataclass(frozen=True)
class Items:
    """A list of sections; a bare text in it is a section's first key.

    With `one`, an item may stand alone, and an empty list is refused unless it may be `empty`. With `numbers` a bare
    number is an item, too.
    """

    section: type[Section]
    allowed: str
    one: bool = False
    numbers: bool = False
    empty: bool = False

    def read(self, value: Any) -> list[Any]:
        """Return mappings and sections."""
        if self.one and isinstance(value, (str, dict)):
            value = [value]
        if not isinstance(value, (list, tuple)) or (self.one and not self.empty and not value):
            raise refuse(f"got {shown(value) if value else 'an empty list'}; allowed: {self.allowed}")
        first = next(iter(self.section.model_fields))
        bare = (str, int, float) if self.numbers else (str,)
        return [{first: item} if isinstance(item, bare) else item for item in value]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return handler.generate_schema(Annotated[source, BeforeValidator(self.read, json_schema_input_type=Any)])


@dataclass(frozen=True)
class ByKind:
    """A choice of sections: the member that the key `kind` names, or the first one where it names none."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        kinds = members(source)

        def kind_of(value: Any) -> str:
            kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
            return next(iter(kinds)) if kind is None else str(kind)

        tagged = tuple(Annotated[member, Tag(kind)] for kind, member in kinds.items())
        return handler.generate_schema(Annotated[Union[tagged], Discriminator(kind_of)])  # noqa: UP007


def members(union: Any) -> dict[str, type[Section]]:
    """The sections of a union by their kinds."""
    return {member.model_fields["kind"].default: member for member in get_args(union)}
