"""Strings that note what a chat template asks about them."""

import re
from collections.abc import Callable
from typing import Any

from tuner.data.encoding.template_limits import names

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


_UNDERSTOOD = names("spied")


def _beyond(method: str) -> Any:
    """A method of a spy of which the answer is not the same for all contents."""

    def answer(spy: "TemplateSpy", *arguments: Any) -> Any:
        spy.asked.too_much = True
        return getattr(str, method)(spy, *arguments)

    return answer


def _looked_for(answer: Callable[["TemplateSpy"], Any], bounded: bool = False) -> Any:
    """A method of a spy that looks for a literal, and its answer where that is not found; with `bounded` anywhere."""

    def method(spy: "TemplateSpy", literal: Any = None, *more: Any) -> Any:
        spy.note_literal(None if bounded and more else literal)
        return answer(spy)

    return method


def _stripped(name: str) -> Any:
    """One of the methods that strip: what is left is a spy again."""

    def method(spy: "TemplateSpy", chars: str | None = None) -> "TemplateSpy":
        if chars is not None and type(chars) is not str:
            spy.asked.too_much = True
        spy.asked.strips.add((name, chars))
        return TemplateSpy.make(getattr(str, name)(spy, chars), spy.asked, spy.joined)

    return method


class TemplateSpy(str):
    """A content that notes what is asked about it; every answer is that of a content without what was asked for."""

    asked: Asked
    joined: bool
    """Whether constants were added to it: what is found in it need not be in the content alone."""

    @staticmethod
    def make(text: str, asked: Asked, joined: bool = False) -> "TemplateSpy":
        """Return a spy of `text` that notes into `asked`."""
        spy = TemplateSpy(text)
        spy.asked, spy.joined = asked, joined
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

    def note_literal(self, value: object) -> None:
        """Note what was looked for."""
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

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True  # contents that fit are not empty

    def __contains__(self, item: object) -> bool:
        self.note_literal(item)
        return False

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is str and other:
            self.note_literal(other)
        elif isinstance(other, str) and other:
            self.asked.too_much = True
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __add__(self, other: str) -> "TemplateSpy":
        return TemplateSpy.make(str.__add__(self, other), self.asked, True)

    def __radd__(self, other: str) -> "TemplateSpy":
        return TemplateSpy.make(str.__add__(other, self), self.asked, True)

    __hash__ = _beyond("__hash__")
    __format__, __len__ = _beyond("__format__"), _beyond("__len__")
    __iter__, __getitem__ = _beyond("__iter__"), _beyond("__getitem__")
    __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __rmod__ = __mul__ = __rmul__ = _refuse

    startswith = endswith = _looked_for(lambda spy: False, bounded=True)
    find = _looked_for(lambda spy: -1, bounded=True)
    split = rsplit = _looked_for(lambda spy: [spy])
    partition = _looked_for(lambda spy: (spy, "", ""))
    rpartition = _looked_for(lambda spy: ("", "", spy))
    replace = removeprefix = removesuffix = _looked_for(lambda spy: spy)
    strip, lstrip, rstrip = _stripped("strip"), _stripped("lstrip"), _stripped("rstrip")


def plain(text: str) -> str:
    """A text's characters as a plain string; asks a spy nothing."""
    return text.plain if isinstance(text, TemplateSpy) else text
