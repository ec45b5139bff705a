"""The value types of a recipe: each reads one value, says what it allows, and writes its own JSON schema."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, GetCoreSchemaHandler, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema


def refuse(message: str) -> PydanticCustomError:
    """Return the error of one field; its message becomes the problem's line as it stands."""
    return PydanticCustomError("recipe", "{message}", {"message": message})


def once(name: Callable[[Any], str | None] = str, says: str = "got {!r} twice") -> AfterValidator:
    """Refuse a list in which two items have one name; any number may have none."""

    def checked(items: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [found for found in map(name, items) if found is not None]
        if twice := [each for number, each in enumerate(names) if each in names[:number]]:
            raise refuse(says.format(twice[0]))
        return items

    return AfterValidator(checked)


def meant(value: object, words: Sequence[str], likeness: float = 0.5) -> str:
    """Return the end of an error that names the word nearest to a value, if one is near."""
    near = get_close_matches(str(value), words, 1, likeness)
    return f"; did you mean {near[0]}?" if near else ""


def shown(value: object) -> str:
    """Return a value as people wrote it, short enough for one line, control characters escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return str(value)


@dataclass(frozen=True)
class ValueType(ABC):
    """A value that is read and checked in one place; an alias is a word that stands for a value.

    `null` and `words` are allowed, too: those of the annotation, such as ``str | None`` or ``int | Literal["auto"]``.
    """

    metavar: ClassVar[str] = "VALUE"
    """What stands for a value in help."""
    null: bool = False
    words: tuple[str, ...] = ()
    aliases: tuple[tuple[str, Any], ...] = ()
    values: tuple[Any, ...] = ()
    """All that may be written, where these are a few."""

    def of(self, annotation: Any) -> Self:
        """The value type of a field with this annotation."""
        if get_origin(annotation) not in {Union, UnionType}:
            return self
        members = get_args(annotation)
        null = NoneType in members and all(meaning is not None for _, meaning in self.aliases)
        words = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
        return replace(self, null=null, words=words)

    @property
    def meanings(self) -> dict[str, Any]:
        """What each word stands for: for itself, or for what its alias does."""
        return {word: word for word in self.words} | dict(self.aliases)

    @property
    def allowed(self) -> str:
        """What may be written, in words."""
        extra = [*self.meanings, *(["null"] if self.null else [])]
        return " or ".join([*([self.what] if self.what else []), *extra])

    def every_word(self) -> list[str]:
        """The values, where these are a few, and the words that may be written, but for aliases."""
        return [str(word) for word in (*self.values, *self.words)]

    @property
    @abstractmethod
    def what(self) -> str:
        """The description of the ordinary values."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the ordinary values."""

    @abstractmethod
    def read(self, value: Any) -> Any:
        """Return the typed value; ValueError (its text is shown) or TypeError (the allowed values are shown)."""

    def check(self, value: Any) -> Any:
        """Return the typed value or raise the field's error."""
        if value is None and self.null:
            return None
        meanings = self.meanings
        if isinstance(value, str) and value in meanings:
            return meanings[value]
        if value is None and None in meanings.values():
            raise refuse(f"got null; allowed: {self.allowed}")
        try:
            return self.read(value)
        except TypeError:
            raise refuse(f"got {shown(value)}; allowed: {self.allowed}{meant(value, [*meanings], 0.6)}") from None
        except ValueError as error:
            raise refuse(str(error)) from None

    def write(self, value: Any) -> Any:
        """Return the plain value that reads back as this one."""
        for word, meaning in self.aliases:
            if value is meaning:
                return word
        return value if value is None or value in self.words else self.plain(value)

    def plain(self, value: Any) -> Any:
        """Return an ordinary value, neither null nor a word, as YAML or JSON takes it."""
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        kind = self.of(source)
        schema = kind.schema()
        constants: list[Any] = [*kind.meanings, *([None] if kind.null else [])]
        if constants:
            schema = {"anyOf": [schema, {"enum": constants}]}
        return handler.generate_schema(
            Annotated[Any, PlainValidator(kind.check), PlainSerializer(kind.write), WithJsonSchema(schema)]
        )


@dataclass(frozen=True)
class Switch(ValueType):
    """`true` or `false`, nothing else."""

    metavar = "BOOL"
    values: tuple[Any, ...] = ("true", "false")

    what = "true or false"

    def read(self, value: Any) -> bool:
        """Return the truth value."""
        if isinstance(value, bool):
            return value
        raise TypeError

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class OneOf(ValueType):
    """One of a few words: those of the annotation, a `Literal`."""

    metavar = "WORD"

    def of(self, annotation: Any) -> Self:
        """The value type of a field with this annotation."""
        return replace(self, values=get_args(annotation))

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return " or ".join(str(value) for value in self.values)

    def read(self, value: Any) -> Any:
        """Return the word."""
        if not isinstance(value, bool) and type(value) in {type(item) for item in self.values} and value in self.values:
            return value
        hint = meant(str(value).lower(), [str(item) for item in self.values])
        raise ValueError(f"got {shown(value)}; allowed: {self.allowed}{hint}")

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return {"enum": list(self.values)}


@dataclass(frozen=True)
class Text(ValueType):
    """A string; `what` says which, `pattern` which characters."""

    metavar = "TEXT"
    what: str = "text"
    pattern: str | None = None

    def read(self, value: Any) -> str:
        """Return the string."""
        if not isinstance(value, str):
            quotes = "" if value is None or isinstance(value, (Mapping, list, tuple)) else " in quotes"
            raise ValueError(f"got {shown(value)}; allowed: {self.allowed}{quotes}")
        is_text = bool(value.strip()) and value.isprintable()
        if not is_text or (self.pattern is not None and re.fullmatch(self.pattern, value) is None):
            raise TypeError
        return value

    def schema(self) -> dict[str, Any]:
        """A string."""
        return {"type": "string", "minLength": 1} | ({"pattern": f"^{self.pattern}$"} if self.pattern else {})


@dataclass(frozen=True)
class WebAddress(ValueType):
    """An http or https URL without a user or password; what is refused is not repeated, as it may hold a secret."""

    metavar = "URL"
    variable: str = ""

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"an http or https URL; one that is a secret belongs in the environment, ${self.variable}"

    def read(self, value: Any) -> str:
        """Return the address."""
        if not isinstance(value, str):
            raise TypeError
        if (problem := address_problem(value)) is not None:
            raise ValueError(f"{problem}; allowed: {self.allowed}")
        return value

    def schema(self) -> dict[str, Any]:
        """A URL."""
        return {"type": "string", "pattern": r"^https?://[^\s/@]+"}


def address_problem(address: str) -> str | None:
    """What keeps an address from being a webhook's, without repeating it; None where nothing does."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return "is no URL"
    if not address.isprintable() or " " in address or parts.scheme not in ("http", "https") or not parts.hostname:
        return "is no http or https URL"
    if parts.username is not None or parts.password is not None:
        return "has a user or password in it"
    return "has port 0" if port == 0 else None


@dataclass(frozen=True, kw_only=True)
class Several(ValueType):
    """A list whose items are of one type: `length` of them where that is given, none where `empty`.

    A text or number in place of a list of any length is a list of that one item.
    """

    item: ValueType
    length: int | None = None
    empty: bool = False

    def of(self, annotation: Any) -> Self:
        """The value type of a field with this annotation; its item's is that of the tuple's members."""
        members = (annotation, *get_args(annotation))
        inner = next(get_args(member)[0] for member in members if get_origin(member) is tuple)
        return replace(super().of(annotation), item=self.item.of(inner))

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        count = "any number" if self.empty else self.length or "at least 1"
        return f"a list of {count}: {self.item.allowed}"

    def read(self, value: Any) -> tuple[Any, ...]:
        """Return the items."""
        if self.length is None and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            if isinstance(value, str) and "," in value:  # several in one text, as other tools write them
                items = ", ".join(part.strip() for part in value.strip("[]").split(",") if part.strip())
                raise ValueError(f"got {shown(value)}; write a list: [{items}]")
            value = [value]
        if not isinstance(value, Sequence) or isinstance(value, str) or not (value or self.empty):
            raise TypeError
        if self.length is not None and len(value) != self.length:
            raise TypeError
        return tuple(self.item.read(item) for item in value)

    def plain(self, value: Any) -> Any:
        """Return a list."""
        return [self.item.plain(item) for item in value]

    def schema(self) -> dict[str, Any]:
        """An array."""
        least = self.length or (0 if self.empty else 1)
        count = {"minItems": least} | ({"maxItems": self.length} if self.length else {})
        several = {"type": "array", "items": self.item.schema()} | count
        return several if self.length else {"anyOf": [self.item.schema(), several]}


@dataclass(frozen=True)
class Table(ValueType):
    """A free mapping of names to plain values."""

    what = "a mapping of names to values, such as {num_hidden_layers: 6}"

    def read(self, value: Any) -> dict[str, Any]:
        """Return the mapping."""
        if not isinstance(value, Mapping):
            raise TypeError
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """An object."""
        return {"type": "object"}


@dataclass(frozen=True)
class Names(ValueType):
    """A mapping of some of `keys` to names of the user's own."""

    keys: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """The description of the ordinary values."""
        return f"a mapping of any of {', '.join(self.keys)} to a name"

    def read(self, value: Any) -> dict[str, str]:
        """Return the mapping."""
        if not isinstance(value, Mapping):
            raise TypeError
        for key, name in value.items():
            if key not in self.keys:
                hint = meant(str(key).lower(), self.keys)
                raise ValueError(f"got the key {shown(str(key))}; allowed: {self.allowed}{hint}")
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise ValueError(f"got {shown(name)} for {key}; allowed: the name of a key in the rows")
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """An object of strings."""
        names = {"type": "string", "minLength": 1}
        return {"type": "object", "properties": dict.fromkeys(self.keys, names), "additionalProperties": False}


WILDCARD = re.compile(r"\*\*|\*")
"""What stands in a glob of tensors' names for a part of a name, and for any parts of it."""
CAPTURE = re.compile(r"\{(\d*)\}")
"""What stands in a new name for what the wildcard of that number stood for, from 1 on."""


@dataclass(frozen=True)
class Renames(ValueType):
    """A mapping of globs of names to new names, which may hold what each wildcard stood for."""

    what = 'a mapping of globs to names, such as {"h.*.attn.**": "model.layers.{1}.self_attn.{2}"}'

    def read(self, value: Any) -> dict[str, str]:
        """Return the mapping."""
        if not isinstance(value, Mapping):
            raise TypeError
        for pattern, name in value.items():
            for text in (pattern, name):
                if not isinstance(text, str) or not text.strip() or not text.isprintable():
                    raise ValueError(f"got {shown(text)}; allowed: {self.allowed}")
            if WILDCARD.search(name):
                raise ValueError(f"got {shown(name)}: a new name has no wildcard; {{1}} is what the first stood for")
            count = len(WILDCARD.findall(pattern))
            for number in CAPTURE.findall(name):
                if not number or not 1 <= int(number) <= count:
                    there = f"its wildcards are {{1}} to {{{count}}}" if count else "it has no wildcard"
                    raise ValueError(f"got {{{number}}} in {shown(name)} for {shown(pattern)}: {there}")
        return dict(value)

    def schema(self) -> dict[str, Any]:
        """An object of strings."""
        return {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}}


T = TypeVar("T")
NEVER: tuple[tuple[str, Any], ...] = (("never", None),)
"""The alias of a value that turns something off."""
Word = Annotated[T, OneOf()]
"""One of the words of a `Literal`."""
