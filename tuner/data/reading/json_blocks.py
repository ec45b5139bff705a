"""JSON files: an object a line, an array, or values one after another, cut into blocks and read as records.

A line ends at `\\n` only: U+2028 is text. It is read here and not by `jsonlines`, since a bad record is to be named by
line and column, and a line's length is bounded.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from tuner.data.reading.block import BLOCK_BYTES, BOM, LINE_BYTES, SHOWN_BYTES, Block, RawRecord, text_of
from tuner.data.reading.elements import Element, Elements, layout
from tuner.data.reading.jsonl import parse_json_record
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.streams import open_stream
from tuner.data.sources import SourceFile

_READ_BYTES = 1 << 16


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
        while part := stream.read(_READ_BYTES):
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
    lines: list[bytes] = []
    cut: list[int] = []
    size, index = 0, 0
    while line := stream.readline(LINE_BYTES + 1):
        if len(line) > LINE_BYTES:
            _end_line(stream, line)
            line = line[:SHOWN_BYTES] + b"\n"  # noqa: PLW2901 (the beginning stands for the line)
            cut.append(len(lines))
        lines.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield Block(file, index, data=b"".join(lines), lines=len(lines), cut=tuple(cut))
            lines, cut, size, index = [], [], 0, index + 1
    if lines:
        yield Block(file, index, data=b"".join(lines), lines=len(lines), cut=tuple(cut))


def _end_line(stream: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = stream.readline(BLOCK_BYTES)


def json_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block."""
    return _element_records(block) if block.spans else _line_records(block)


def _line_records(block: Block) -> Iterator[RawRecord]:
    for number, line in enumerate(_json_lines(block), 1):
        raw = line
        if number == 1 and block.index == 0:
            raw = raw.removeprefix(BOM)
        raw = raw.rstrip(b"\r\n")
        if len(raw) > LINE_BYTES or number - 1 in block.cut:
            yield _too_long(number, raw, 1)
        elif raw.strip(b" \t"):
            try:
                yield RawRecord(number, raw, parse_json_record(raw), None)
            except RecordProblem as problem:
                yield RawRecord(number, raw, None, problem)


def _json_lines(block: Block) -> Iterator[bytes]:
    """The lines of a block; of one that is too long, its first LINE_BYTES and one more."""
    if block.data is not None or block.stop - block.start <= 2 * BLOCK_BYTES:
        yield from text_of(block).split(b"\n")
        return
    with block.file.path.open("rb") as stream:
        stream.seek(block.start)
        while stream.tell() < block.stop and (line := stream.readline(LINE_BYTES + 1)):
            yield line
            if len(line) > LINE_BYTES:
                _end_line(stream, line)


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
        raw = data[offset : offset + size]
        if too_long:
            yield _too_long(line, raw, col)
            continue
        try:
            yield RawRecord(line, raw, parse_json_record(raw), None, col)
        except RecordProblem as problem:
            yield RawRecord(line, raw, None, problem, col)
