"""The values of a JSON array, or of JSON values one after another, found in a stream without holding the file.

Only brackets and strings are looked at: a value that is wrong inside is still found whole, and judged as a record.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

from tuner.errors import DataError

_READ_BYTES = 1 << 20
_WORD_BYTES = 1 << 20
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_BLANK = re.compile(rb"[ \t\r\n]*+")
_STRUCTURE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\r\n,\[\]{}\"]++")
_OUTSIDE = re.compile(rb'["{}\[\]]')
_INSIDE = re.compile(rb'\\.|"', re.DOTALL)


class Element(NamedTuple):
    """One value: where it lies in the (inflated) file, and where a person finds it."""

    offset: int
    raw: bytes
    """Its bytes; of one that is too long, the first of them."""
    line: int
    col: int
    """Line and column from 1, in characters."""
    too_long: bool


class Elements:
    """Splits a stream into values; an array where `array`, else values one after another. A value has `limit` bytes."""

    def __init__(self, stream: BinaryIO, name: str, array: bool, limit: int) -> None:
        self._stream = stream
        self._name = name
        self._array = array
        self._limit = limit
        self._buffer = b""
        self._base = 0
        self._at = 0
        self._ended = False
        self._line, self._col = 1, 1

    def __iter__(self) -> Iterator[Element]:
        """Yield the values. DataError where the stream is no array, or ends inside of one: nothing after is found."""
        self.first()
        if self._array:
            self._step(b"[")
            if self._peek() == b"]":
                self._step(b"]")
                self._end()
                return
        while self._array or self._peek():
            yield self._element()
            if self._array and self._peek() != b",":
                self._step(b"]")
                self._end()
                return
            if self._array:
                self._step(b",")

    def first(self) -> bytes:
        """The first byte of the stream that is no blank; empty where there is none."""
        if self._base == 0 and not self._buffer:
            self._more()
            if self._buffer.startswith(b"\xef\xbb\xbf"):
                self._base, self._buffer = 3, self._buffer[3:]
        return self._peek()

    def goes_on(self, value: Element) -> bool:
        """Whether `value`, just yielded, has more than one line or is followed by another one on its last line."""
        return b"\n" in value.raw or (bool(self._peek()) and self._line == value.line)

    @property
    def line(self) -> int:
        """The line that has been reached."""
        return self._line

    def _more(self) -> bool:
        held = len(self._buffer) - self._at
        block = self._stream.read(max(_READ_BYTES, min(held, self._limit - held)))
        self._ended = not block
        self._buffer, self._base, self._at = self._buffer[self._at :] + block, self._base + self._at, 0
        return not self._ended

    def _pass(self, stop: int) -> None:
        """Go on to position `stop` of the buffer, counting lines and columns."""
        passed = self._buffer[self._at : stop]
        lines = passed.count(b"\n")
        if lines:
            self._line += lines
            self._col = 1
            passed = passed[passed.rfind(b"\n") + 1 :]
        self._col += len(passed) if passed.isascii() else len(passed.translate(None, _CONTINUATION))
        self._at = stop

    def _peek(self) -> bytes:
        """The next byte that is no blank; empty at the end."""
        while True:
            match = _BLANK.match(self._buffer, self._at)
            self._pass(match.end() if match else self._at)
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more():
                return b""

    def _step(self, wanted: bytes) -> None:
        found = self._peek()
        if found != wanted:
            self._fail(f"expected {wanted.decode()!r}, got {_shown(found)}")
        self._pass(self._at + 1)

    def _end(self) -> None:
        if found := self._peek():
            self._fail(f"expected the end of the file after the array, got {_shown(found)}")

    def _fail(self, reason: str) -> None:
        raise DataError(
            f"{self._name}:{self._line}:{self._col}: not JSON: {reason}",
            hint="an array cannot be read past its broken place; write JSON lines, where each row stands alone",
        )

    def _element(self) -> Element:
        first = self._peek()
        line, col = self._line, self._col
        if first in (b"", b",", b"]", b"}"):
            self._fail(f"expected a value, got {_shown(first)}")
        stop = self._close(line, col) if first in (b"{", b"[", b'"') else self._scalar()
        if stop is None:
            return self._skip(line, col)
        element = Element(self._base + self._at, self._buffer[self._at : stop], line, col, False)
        self._pass(stop)
        return element

    def _scalar(self) -> int:
        while True:
            match = _SCALAR.match(self._buffer, self._at)
            stop = match.end() if match else self._at + 1
            if stop < len(self._buffer) or not self._more():
                return stop
            if stop - self._at > _WORD_BYTES:
                self._fail("a word of more than a MiB")

    def _close(self, line: int, col: int) -> int | None:
        """Position after the value that starts here; None where it is longer than the limit."""
        done, depth = 0, 0
        while True:
            for match in _STRUCTURE.finditer(self._buffer, self._at + done):
                token = match.group()
                if token == b'"':
                    break
                done = match.end() - self._at
                depth += (token in b"{[") - (token in b"}]")
                if depth == 0:
                    return None if done > self._limit else match.end()
            else:
                done = len(self._buffer) - self._at
            if len(self._buffer) - self._at > self._limit:
                return None
            if not self._more():
                self._line, self._col = line, col
                self._fail("the value that starts here never ends")

    def _skip(self, line: int, col: int) -> Element:
        """Pass over a value that is longer than the limit, a block at a time."""
        element = Element(self._base + self._at, self._buffer[self._at : self._at + 200], line, col, True)
        depth, inside = 0, False
        while True:
            stop = self._at
            while match := (_INSIDE if inside else _OUTSIDE).search(self._buffer, stop):
                stop = match.end()
                token = match.group()
                if token == b'"':
                    inside = not inside
                elif not inside:
                    depth += 1 if token in b"{[" else -1
                if depth == 0 and not inside:
                    self._pass(stop)
                    return element
            # A backslash at the very end goes with the byte after it.
            self._pass(len(self._buffer) - (inside and stop < len(self._buffer) and self._buffer.endswith(b"\\")))
            if not self._more():
                self._line, self._col = line, col
                self._fail("the value that starts here never ends")


def layout(stream: BinaryIO, limit: int) -> Literal["array", "values", "lines"]:
    """Tell from its start how a JSON file is written: one array, values one after another, or one object a line."""
    elements = Elements(stream, "", False, limit)
    values = iter(elements)
    try:
        if elements.first() == b"[":
            return "array"
        value = next(values, None)
        if value is None or value.too_long or not elements.goes_on(value):
            return "lines"
    except DataError:
        return "lines"
    return "values"


def _shown(found: bytes) -> str:
    return repr(found.decode("utf-8", "replace")) if found else "the end of the file"
