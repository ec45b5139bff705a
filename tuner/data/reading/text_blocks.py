"""Text files: plain ones, a document a file in pieces of bounded size, and CSV and TSV files with a header line.

Quoted fields of the latter may hold separators and line ends.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import orjson

from tuner.data.reading.block import BLOCK_BYTES, BOM, LINE_BYTES, SHOWN_BYTES, Block, RawRecord, open_stream, text_of
from tuner.data.reading.problems import RecordProblem, quoted
from tuner.data.sources import SourceFile
from tuner.errors import DataError

FIELD_CHARS = 16 << 20
"""A longer field is an error: most likely its quote is not closed."""
_DELIMITERS = {"csv": ",", "tsv": "\t"}


def text_blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a text file at line ends, each block one document."""
    with open_stream(file) as stream:
        start, index, rest = 0, 0, b""
        while piece := rest + stream.read(BLOCK_BYTES - len(rest)):
            cut = len(piece)
            if cut == BLOCK_BYTES:
                cut = piece.rfind(b"\n") + 1 or _character_start(piece)
            piece, rest = piece[:cut], piece[cut:]
            data = piece if file.compression else None
            yield Block(file, index, start, start + cut, data, lines=piece.count(b"\n"))
            start, index = start + cut, index + 1


def _character_start(piece: bytes) -> int:
    """Where the last character of a piece without a line end begins."""
    last = len(piece) - 1
    return next((at for at in range(last, last - 3, -1) if piece[at] & 0xC0 != 0x80), last - 3)


def text_records(block: Block) -> Iterator[RawRecord]:
    """Yield the document of a block, or nothing where it is blank."""
    piece = text_of(block)
    if block.index == 0:
        piece = piece.removeprefix(BOM)
    shown = piece[:SHOWN_BYTES]
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        before = piece[: error.start].decode("utf-8")
        yield _text_problem(before, shown, f"not UTF-8: byte 0x{piece[error.start]:02x}")
        return
    if not text.strip():
        return
    position = text.find("\0")
    if position >= 0:
        yield _text_problem(text[:position], shown, "NUL character")
    else:
        yield RawRecord(1, shown, {"text": text}, None, 0)


def _text_problem(before: str, shown: bytes, reason: str) -> RawRecord:
    problem = RecordProblem(reason, len(before) - before.rfind("\n"))
    return RawRecord(1 + before.count("\n"), shown, None, problem, 0)


@dataclass
class _Lines:
    """Lines of a CSV file as text, counted since the last cut; bytes that are not UTF-8 become lone surrogates."""

    stream: BinaryIO
    name: str
    keep: bool
    bom: bool
    total: int = 0
    lines: int = 0
    size: int = 0
    kept: list[bytes] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        while line := self.stream.readline(LINE_BYTES + 1):
            self.total += 1
            if len(line) > LINE_BYTES:
                raise DataError(f"{self.name}:{self.total}:1: the line is longer than {LINE_BYTES >> 20} MiB")
            self.lines += 1
            self.size += len(line)
            if self.keep:
                self.kept.append(line)
            if self.bom and self.total == 1:
                line = line.removeprefix(BOM)  # noqa: PLW2901
            yield line.decode("utf-8", "surrogateescape")

    def cut(self) -> tuple[bytes, int, int]:
        """Return what was read since the last cut: bytes where they are kept, lines, and size."""
        done = b"".join(self.kept), self.lines, self.size
        self.kept, self.lines, self.size = [], 0, 0
        return done


def csv_blocks(file: SourceFile) -> Iterator[Block]:
    """Cut a file between two records. DataError where quotes are wrong: what follows cannot be told apart."""
    csv.field_size_limit(FIELD_CHARS)
    with open_stream(file) as stream:
        lines = _Lines(stream, file.name, bool(file.compression), True)
        records = csv.reader(lines, delimiter=_DELIMITERS[file.kind], strict=True)
        header: tuple[str, ...] = ()
        start, index, more = 0, 0, True
        while more:
            try:
                header = header or _header(file, _filled(records), lines.total)
                while lines.size < BLOCK_BYTES and next(records, None) is not None:
                    pass
            except csv.Error as error:
                raise DataError(
                    f"{file.name}:{lines.total}:1: not {file.kind.upper()}: {error}",
                    hint="fields with quotes, separators or line ends stand in quotes, and their quotes are doubled",
                ) from error
            more = lines.size >= BLOCK_BYTES
            data, count, size = lines.cut()
            if size:
                inflated = data if file.compression else None
                yield Block(file, index, start, start + size, inflated, header=header, lines=count)
            start, index = start + size, index + 1


def _filled(records: Iterator[list[str]]) -> list[str]:
    """The next record that is no blank line, or nothing."""
    return next((fields for fields in records if fields), [])


def _header(file: SourceFile, names: list[str], line: int) -> tuple[str, ...]:
    if not all(name.strip() and name.isprintable() for name in names) or len(set(names)) != len(names):
        raise DataError(f"{file.name}:{line}:1: the first line names the columns: each once, none empty")
    if file.kind == "csv" and len(names) == 1 and ";" in names[0]:
        raise DataError(
            f"{file.name}:{line}:1: the fields are separated by semicolons: {quoted(names[0])}",
            hint="separate them by commas, or save the file as .tsv, separated by tabs",
        )
    return tuple(names)


def csv_records(block: Block) -> Iterator[RawRecord]:
    """Yield the records of a block, each value a string."""
    csv.field_size_limit(FIELD_CHARS)
    lines = _Lines(io.BytesIO(text_of(block)), block.file.name, False, block.index == 0)
    records = csv.reader(lines, delimiter=_DELIMITERS[block.file.kind], strict=True)
    if block.index == 0:
        _filled(records)
    done = lines.lines
    for fields in records:
        line, done = done + 1, lines.lines
        if not fields:
            continue
        text = "".join(fields)
        if reason := _wrong(text, len(fields), len(block.header)):
            shown = text.encode("utf-8", "surrogateescape")[:SHOWN_BYTES]
            yield RawRecord(line, shown, None, RecordProblem(reason), 0)
        else:
            value = dict(zip(block.header, fields, strict=True))
            yield RawRecord(line, orjson.dumps(value), value, None, 0)


def _wrong(text: str, fields: int, columns: int) -> str | None:
    """Why a record of so many fields, here joined, cannot be used."""
    if fields != columns:
        return f"{fields} fields for {columns} columns"
    if "\0" in text:
        return "NUL character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8: byte 0x{ord(text[error.start]) - 0xDC00:02x}"
    return None
