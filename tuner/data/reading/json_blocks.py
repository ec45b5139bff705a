"""JSON files: an object a line, an array, or values one after another, cut into blocks and read as records.

The values of an array are found in a stream without holding the file. Only brackets and strings are looked at: a value
that is wrong inside is still found whole, and judged as a record. A line ends at `\\n` only: U+2028 is text. It is read
here and not by `jsonlines`, since a bad record is to be named by line and column, and a line's length is bounded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from tuner.data.reading.block import BLOCK_BYTES, BOM, LINE_BYTES, SHOWN_BYTES, Block, RawRecord, open_stream, text_of
from tuner.data.reading.jsonl import parse_json_record
from tuner.data.reading.problems import RecordProblem
from tuner.data.sources import SourceFile
from tuner.errors import DataError

_READ_BYTES, _TAIL_BYTES = 1 << 20, 1 << 16
_WORD_BYTES = 1 << 20
_MOST_DEPTH = 1 << 16
"""Brackets in each other of a value that is passed over; far fewer make a bad record."""
_CONTINUATION = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""
_BLANK = re.compile(rb"[ \t\r\n]*+")
_EMPTY_LINES = re.compile(rb"[ \t\n]*+")
"""A block in which no line is a record; other whitespace than this is no JSON."""
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


@dataclass
class Elements:
    """Splits a stream into values; an array where `array`, else values one after another. A value has `limit` bytes."""

    stream: BinaryIO
    name: str
    array: bool
    limit: int
    line: int = field(default=1, init=False)
    """The line that has been reached."""
    _col: int = field(default=1, init=False)
    _buffer: bytes = field(default=b"", init=False)
    _base: int = field(default=0, init=False)
    _at: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Element]:
        """Yield the values. DataError where the stream is no array, or ends inside of one: nothing after is found."""
        self.first()
        if not self.array:
            while self._peek():
                yield self._element()
            return
        self._step(b"[")
        more = self._peek() != b"]"
        while more:
            yield self._element()
            if more := self._peek() == b",":
                self._step(b",")
        self._step(b"]")
        if found := self._peek():
            self._fail(f"expected the end of the file after the array, got {_shown(found)}")

    def first(self) -> bytes:
        """The first byte of the stream that is no blank; empty where there is none."""
        if self._base == 0 and not self._buffer:
            self._more()
            if self._buffer.startswith(b"\xef\xbb\xbf"):
                self._base, self._buffer = 3, self._buffer[3:]
        return self._peek()

    def shares_lines(self, value: Element) -> bool:
        """Whether `value`, just yielded, has more than one line or is followed by another one on its last line."""
        return b"\n" in value.raw or (bool(self._peek()) and self.line == value.line)

    def _more(self) -> bool:
        held = len(self._buffer) - self._at
        block = self.stream.read(max(_READ_BYTES, min(held, self.limit - held)))
        self._buffer, self._base, self._at = self._buffer[self._at :] + block, self._base + self._at, 0
        return bool(block)

    def _pass(self, stop: int) -> None:
        """Advance to position `stop` of the buffer, counting lines and columns."""
        passed = self._buffer[self._at : stop]
        lines = passed.count(b"\n")
        if lines:
            self.line += lines
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

    def _fail(self, reason: str) -> None:
        raise DataError(
            f"{self.name}:{self.line}:{self._col}: not JSON: {reason}",
            hint="an array cannot be read past its broken place; write JSON lines, where each row stands alone",
        )

    def _element(self) -> Element:
        first = self._peek()
        line, col = self.line, self._col
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
                if not 0 < depth < _MOST_DEPTH:
                    if depth:
                        self._fail("nested too deeply")
                    return None if done > self.limit else match.end()
            else:
                done = len(self._buffer) - self._at
            if len(self._buffer) - self._at > self.limit:
                return None
            if not self._more():
                self.line, self._col = line, col
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
                if depth == _MOST_DEPTH:
                    self._fail("nested too deeply")
                if depth == 0 and not inside:
                    self._pass(stop)
                    return element
            # A backslash at the very end goes with the byte after it.
            self._pass(len(self._buffer) - (inside and stop < len(self._buffer) and self._buffer.endswith(b"\\")))
            if not self._more():
                self.line, self._col = line, col
                self._fail("the value that starts here never ends")


def layout(stream: BinaryIO, limit: int) -> Literal["array", "values", "lines"]:
    """Tell from its start how a JSON file is written: one array, values one after another, or one object a line."""
    elements = Elements(stream, "", False, limit)
    values = iter(elements)
    try:
        if elements.first() == b"[":
            return "array"
        value = next(values, None)
        if value is None or value.too_long or not elements.shares_lines(value):
            return "lines"
    except DataError:
        return "lines"
    return "values"


def _shown(found: bytes) -> str:
    return repr(found.decode("utf-8", "replace")) if found else "the end of the file"


def json_blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a JSON file. DataError where an array is broken."""
    written = "lines"
    if file.kind == "json":
        with open_stream(file) as stream:
            written = layout(stream, LINE_BYTES)
    with open_stream(file) as stream:
        if written != "lines":
            yield from _element_blocks(file, Elements(stream, file.name, written == "array", LINE_BYTES))
        elif file.compression:
            yield from _line_data(file, stream)
        else:
            yield from _line_ranges(file, stream)


def _line_ranges(file: SourceFile, stream: BinaryIO) -> Iterator[Block]:
    start, index = 0, 0
    while True:
        stop = stream.seek(start + BLOCK_BYTES - 1)
        while part := stream.read(_TAIL_BYTES):
            found = part.find(b"\n")
            stop += found + 1 if found >= 0 else len(part)
            if found >= 0:
                break
        else:
            stop = min(stop, stream.seek(0, 2))
        if stop > start:
            yield Block(file, index, start, stop)
        if not part:
            return
        start, index = stop, index + 1


def _line_data(file: SourceFile, stream: BinaryIO) -> Iterator[Block]:
    """Blocks of whole lines; of a line that is too long, its beginning."""
    index = 0
    while data := stream.read(min(BLOCK_BYTES, LINE_BYTES)):
        start = data.rfind(b"\n") + 1
        parts, size = [data], len(data) - start
        while size <= LINE_BYTES and not parts[-1].endswith(b"\n"):
            if not (part := stream.readline(BLOCK_BYTES)):
                break
            parts.append(part)
            size += len(part)
        cut: tuple[int, ...] = ()
        if size > LINE_BYTES:
            _end_line(stream, parts[-1])
            shown = b"".join((data[start:], *parts[1:2]))[:SHOWN_BYTES]
            parts, cut = [data[:start], shown, b"\n"], (data.count(b"\n"),)
        data = b"".join(parts)  # noqa: PLW2901 (with the rest of its last line)
        yield Block(file, index, data=data, lines=data.count(b"\n") + (not data.endswith(b"\n")), cut=cut)
        index += 1


def _end_line(stream: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = stream.readline(BLOCK_BYTES)


def json_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block."""
    return _element_records(block) if block.spans else _line_records(block)


def _line_records(block: Block) -> Iterator[RawRecord]:
    for number, line in enumerate(_json_lines(block), 1):
        raw = (line.removeprefix(BOM) if number == 1 and block.index == 0 else line).rstrip(b"\r\n")
        if len(raw) > LINE_BYTES or number - 1 in block.cut:
            yield _too_long(number, raw, 1)
        elif raw.strip(b" \t"):
            yield _record(number, raw, 1)


def _json_lines(block: Block) -> Iterator[bytes]:
    """The lines of a block; of one that is too long, its first LINE_BYTES and one more."""
    if block.data is not None or block.stop - block.start <= 2 * BLOCK_BYTES:
        text = text_of(block)
        yield from text.split(b"\n") if not _EMPTY_LINES.fullmatch(text) else ()
        return
    with block.file.path.open("rb") as stream:
        stream.seek(block.start)
        while stream.tell() < block.stop and (line := stream.readline(LINE_BYTES + 1)):
            yield line
            if len(line) > LINE_BYTES:
                _end_line(stream, line)


def _record(line: int, raw: bytes, col: int) -> RawRecord:
    try:
        return RawRecord(line, raw, parse_json_record(raw), None, col)
    except RecordProblem as problem:
        return RawRecord(line, raw, None, problem, col)


def _too_long(line: int, raw: bytes, col: int) -> RawRecord:
    problem = RecordProblem(f"the row is longer than {LINE_BYTES >> 20} MiB", 1)
    return RawRecord(line, raw[:SHOWN_BYTES], None, problem, col)


def _element_blocks(file: SourceFile, elements: Elements) -> Iterator[Block]:
    found: list[Element] = []
    size, index, lines = 0, 0, 0
    for element in elements:
        if found and size >= BLOCK_BYTES:
            yield _element_block(file, index, found, lines, element.line - 1)
            found, size, index, lines = [], 0, index + 1, element.line - 1
        found.append(element)
        size += len(element.raw)
    if found:
        yield _element_block(file, index, found, lines, elements.line)


def _element_block(file: SourceFile, index: int, elements: list[Element], before: int, after: int) -> Block:
    """A block of elements after `before` lines of the file; the next one starts after `after`."""
    start = elements[0].offset
    sizes = np.array([len(element.raw) for element in elements], dtype=np.int64)
    spans = np.empty((len(elements), 5), dtype=np.int64)
    spans[:, 0] = np.cumsum(sizes) - sizes if file.compression else [element.offset - start for element in elements]
    spans[:, 1] = sizes
    spans[:, 2:] = [(element.line - before, element.col, element.too_long) for element in elements]
    data = b"".join(element.raw for element in elements) if file.compression else None
    return Block(file, index, start, data=data, spans=spans.tobytes(), lines=after - before)


def _element_records(block: Block) -> Iterator[RawRecord]:
    spans = np.frombuffer(block.spans, dtype=np.int64).reshape(-1, 5)
    if block.data is not None:
        yield from _judged(spans, block.data)
        return
    with block.file.path.open("rb") as stream:
        # A value that is too long lies between two others: read around it.
        for run in np.split(spans, np.flatnonzero(spans[:, 4]) + 1):
            if len(run):
                stream.seek(block.start + int(run[0, 0]))
                data = stream.read(int(run[-1, 0] + run[-1, 1] - run[0, 0]))
                yield from _judged(run - [run[0, 0], 0, 0, 0, 0], data)


def _judged(spans: np.ndarray[Any, np.dtype[np.int64]], data: bytes) -> Iterator[RawRecord]:
    for offset, size, line, col, too_long in spans.tolist():
        yield (_too_long if too_long else _record)(line, data[offset : offset + size], col)
