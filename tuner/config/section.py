"""What every section of the recipe is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, GetCoreSchemaHandler, Tag
from pydantic_core import core_schema

from tuner.config.duration import Duration
from tuner.config.rule import Rule
from tuner.config.value_types import Switch, Table, Text, refuse, shown

Auto = Literal["auto"]
Durations = tuple[Duration, ...]
Bool = Annotated[bool, Switch()]
PLUGIN = r"(?:.+\.py:[^\W\d]\w*|(?!.*\.py$)(?!.*:)\S.*)"
Use = Annotated[str, Text(kind="FILE.py:NAME or the name of an entry point", pattern=PLUGIN)]
"""Code of the user's own."""
Options = Annotated[dict[str, Any], Table()]
"""Its keyword arguments."""


Effect = Literal["safe", "warn", "refuse"]
"""What it means for a resumed run that a key has another value (`run/changes.py`)."""


class Section(BaseModel):
    """A frozen part of the recipe that knows its keys and refuses others."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
    on_resume: ClassVar[Mapping[str, Effect]] = {}
    """What a change of a key means for a resumed run, where that differs from what it means for those above it."""
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What the section cannot be together with other keys."""

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
