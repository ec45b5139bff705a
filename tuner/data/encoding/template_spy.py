"""Strings that note what a chat template asks about them."""

import re
from typing import Any

_RESERVED = re.compile("[\ufdd0-\ufdef]")


def has_reserved(text: str) -> bool:
    """Whether a text holds one of the noncharacters that mark places while a template is rendered."""
    return _RESERVED.search(text) is not None


class Asked:
    """What a template asked about its spies: literals looked for, strips, or more than can be answered for all."""

    def __init__(self) -> None:
        self.literals: set[str] = set()
        self.strips: set[tuple[str, str | None]] = set()
        self.too_much = False


_UNDERSTOOD = frozenset(
    {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "replace", "strip", "lstrip", "rstrip"}
    | {"plain", "asked", "joined", "make", "with_mark", "removeprefix", "removesuffix", "find"}
)


class TemplateSpy(str):
    """A content that notes what is asked about it; every answer is that of a content without what was asked for."""

    asked: Asked
    joined: bool
    """Whether constants were added to it: what is found in it need not be in the content alone."""

    @staticmethod
    def make(text: str, asked: Asked, joined: bool = False) -> "TemplateSpy":
        """Return a spy of `text` that notes into `asked`."""
        spy = TemplateSpy(text)
        spy.asked = asked
        spy.joined = joined
        return spy

    def with_mark(self, mark: str) -> "TemplateSpy":
        """Return the spy with a character put before it."""
        return TemplateSpy.make(mark + self.plain, self.asked, self.joined)

    @property
    def plain(self) -> str:
        """The spy's characters as a plain string."""
        return "".join(str.__iter__(self))

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in _UNDERSTOOD:
            str.__getattribute__(self, "asked").too_much = True
        return str.__getattribute__(self, name)

    def _literal(self, value: object) -> None:
        if self.joined:
            self.asked.too_much = True
        for item in value if isinstance(value, tuple) else (value,):
            if type(item) is str and item:
                self.asked.literals.add(item)
            else:  # None is any white space, and a spy is no constant
                self.asked.too_much = True

    def _refuse(self, *_: object, **__: object) -> Any:
        self.asked.too_much = True
        return NotImplemented

    def _strip(self, method: str, chars: str | None) -> "TemplateSpy":
        if chars is not None and type(chars) is not str:
            self.asked.too_much = True
        self.asked.strips.add((method, chars))
        return TemplateSpy.make(getattr(str, method)(self, chars), self.asked, self.joined)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True  # contents that fit are not empty

    def __contains__(self, item: object) -> bool:
        self._literal(item)
        return False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is str and other:
            self._literal(other)
        elif isinstance(other, str) and other:
            self.asked.too_much = True
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: str) -> "TemplateSpy":
        return TemplateSpy.make(str.__add__(self, other), self.asked, True)

    def __radd__(self, other: str) -> "TemplateSpy":
        return TemplateSpy.make(str.__add__(other, self), self.asked, True)

    def __format__(self, spec: str) -> str:
        self.asked.too_much = True
        return str.__format__(self, spec)

    def __hash__(self) -> int:
        self.asked.too_much = True
        return str.__hash__(self)

    def __len__(self) -> int:
        self.asked.too_much = True
        return str.__len__(self)

    def __iter__(self) -> Any:
        self.asked.too_much = True
        return str.__iter__(self)

    def __getitem__(self, key: Any) -> str:
        self.asked.too_much = True
        return str.__getitem__(self, key)

    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __rmod__ = __mul__ = __rmul__ = _refuse

    def startswith(self, prefix: Any, *bounds: Any) -> bool:  # noqa: D102
        self._literal(None if bounds else prefix)
        return False

    def endswith(self, suffix: Any, *bounds: Any) -> bool:  # noqa: D102
        self._literal(None if bounds else suffix)
        return False

    def find(self, sub: Any, *bounds: Any) -> int:  # noqa: D102
        self._literal(None if bounds else sub)
        return -1

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:  # noqa: D102
        self._literal(sep)
        return [self]

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list[str]:  # noqa: D102
        self._literal(sep)
        return [self]

    def partition(self, sep: Any) -> tuple[str, str, str]:  # noqa: D102
        self._literal(sep)
        return self, "", ""

    def rpartition(self, sep: Any) -> tuple[str, str, str]:  # noqa: D102
        self._literal(sep)
        return "", "", self

    def replace(self, old: Any, new: Any, count: Any = -1) -> str:  # noqa: D102
        self._literal(old)
        return self

    def removeprefix(self, prefix: Any) -> str:  # noqa: D102
        self._literal(prefix)
        return self

    def removesuffix(self, suffix: Any) -> str:  # noqa: D102
        self._literal(suffix)
        return self

    def strip(self, chars: str | None = None) -> str:  # noqa: D102
        return self._strip("strip", chars)

    def lstrip(self, chars: str | None = None) -> str:  # noqa: D102
        return self._strip("lstrip", chars)

    def rstrip(self, chars: str | None = None) -> str:  # noqa: D102
        return self._strip("rstrip", chars)


def plain(text: str) -> str:
    """A text's characters as a plain string; asks a spy nothing."""
    return text.plain if isinstance(text, TemplateSpy) else text
