"""Files to raw rows: JSON lines with exact positions, and plain text in bounded pieces.

JSON lines are read here and not by the `jsonlines` reader: a bad row must be named by line and column, lines end at
`\\n` only (U+2028 is text), duplicate keys, NaN and lone surrogates are errors, and a line's length is bounded.
"""

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

from tuner.data.problems import KeyPath, RowProblem
from tuner.errors import DataError

if TYPE_CHECKING:
    from tuner.config.recipe import DataSource

LINE_BYTES = 64 << 20
"""A longer line is a bad row: memory stays bounded."""
PIECE_BYTES = 4 << 20
"""A longer text file becomes several documents, cut at line ends."""
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_CONSTANTS = ("NaN", "Infinity", "-Infinity")

@dataclass(frozen=True)
class SourceFile:
    """One file and how it is read."""

    path: Path
    kind: Literal["jsonl", "text"]
    format: str

    def identity(self) -> list[str]:
        """What of the file decides the rows: its kind, the forced format and the SHA-256 of its bytes."""
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        return [self.kind, self.format, digest.hexdigest()]


@dataclass(frozen=True)
class RawRow:
    """A row as read: its value, or the problem that made it unreadable."""

    path: Path
    line: int
    text: str
    value: dict[str, Any] | None
    problem: RowProblem | None = None

    def place(self, problem: RowProblem) -> tuple[int, int]:
        """Return line and column (from 1) of a problem in this row."""
        if problem.col is not None or self.value is None or not problem.path:
            return self.line, problem.col or 1
        return self.line, _locate(self.text, problem.path)


def expand(sources: "Sequence[DataSource]") -> list[SourceFile]:
    """Return the files of the recipe's sources, globs expanded and sorted; DataError for what is not there."""
    files: list[SourceFile] = []
    for source in sources:
        path = Path(source.path).expanduser()
        if path.is_dir():
            raise DataError(f"{path}: is a directory", hint=f"write a glob, such as {path}/*.jsonl")
        found = [path] if path.is_file() else []
        if not found and glob.has_magic(str(path)):
            found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise DataError(
                f"{source.path}: no such file", hint="rows are read from local files; fetch a hub data set first"
            )
        files += [SourceFile(file, _kind(file, source.format), source.format) for file in found]
    return files


def read_rows(file: SourceFile) -> Iterator[RawRow]:
    """Yield the rows of one file; unreadable ones carry their problem. DataError where the file cannot be read."""
    try:
        with file.path.open("rb") as handle:
            yield from _text_rows(file, handle) if file.kind == "text" else _json_rows(file, handle)
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}") from error


def _kind(path: Path, forced: str) -> Literal["jsonl", "text"]:
    suffix = path.suffix.lower()
    if suffix in _JSON_SUFFIXES:
        return "jsonl"
    if suffix in _TEXT_SUFFIXES or forced == "text":
        return "text"
    if forced != "auto":
        return "jsonl"
    raise DataError(
        f"{path}: unknown kind of file {suffix or '(no suffix)'}",
        hint=f"known: {', '.join(_JSON_SUFFIXES + _TEXT_SUFFIXES)}; or give {{path, format}}",
    )


def _json_rows(file: SourceFile, handle: BinaryIO) -> Iterator[RawRow]:
    line = 0
    while raw := handle.readline(LINE_BYTES + 1):
        line += 1
        if len(raw) > LINE_BYTES:
            shown = raw[:200].decode("utf-8", "replace")
            while raw and not raw.endswith(b"\n"):
                raw = handle.readline(LINE_BYTES)
            problem = RowProblem(f"the line is longer than {LINE_BYTES >> 20} MiB", 1)
            yield RawRow(file.path, line, shown, None, problem)
            continue
        if line == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        raw = raw.rstrip(b"\r\n")
        if raw.strip(b" \t"):
            yield _json_row(file.path, line, raw)


def _json_row(path: Path, line: int, raw: bytes) -> RawRow:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        col = len(raw[: error.start].decode("utf-8")) + 1
        problem = RowProblem(f"not UTF-8: byte 0x{raw[error.start]:02x}", col)
        return RawRow(path, line, raw.decode("utf-8", "replace"), None, problem)
    try:
        return RawRow(path, line, text, parse_json_row(text))
    except RowProblem as problem:
        return RawRow(path, line, text, None, problem)


def parse_json_row(text: str) -> dict[str, Any]:
    """Parse one line strictly: an object, no duplicate keys, no NaN, no NUL or lone surrogate. RowProblem."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        raise RowProblem(f"not JSON: {error.msg}", error.colno if error.lineno == 1 else error.pos + 1) from error
    except RecursionError as error:
        raise RowProblem("nested too deeply", 1) from error
    except RowProblem as problem:
        raise RowProblem(problem.reason, _bad_token(text)) from problem
    except ValueError as error:  # an integer of thousands of digits
        raise RowProblem(f"not JSON: {error}", 1) from error
    if "\\u" in text:
        _check_escapes(text)
    if not isinstance(value, dict):
        hint = "; a JSON array cannot be read line by line: write one object per line" if text[:1] == "[" else ""
        raise RowProblem(f"a row is an object, got {type(value).__name__}{hint}", 1)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowProblem(f"duplicate key {key!r}")
    return value


def _constant(name: str) -> NoReturn:
    raise RowProblem(f"{name} is not JSON")


def _check_escapes(text: str) -> None:
    high: re.Match[str] | None = None
    for match in _ESCAPE.finditer(text):
        code = int(match[1], 16) if match[1] else 0x20
        low_follows = high is not None and match.start() == high.end() and 0xDC00 <= code <= 0xDFFF
        if high is not None and not low_follows:
            raise RowProblem(f"lone surrogate {high.group()}", high.start() + 1)
        high = match if 0xD800 <= code <= 0xDBFF else None
        if 0xDC00 <= code <= 0xDFFF and not low_follows:
            raise RowProblem(f"lone surrogate {match.group()}", match.start() + 1)
        if code == 0:
            raise RowProblem("NUL character", match.start() + 1)
    if high is not None:
        raise RowProblem(f"lone surrogate {high.group()}", high.start() + 1)


def _scan(text: str) -> Iterator[tuple[bool, KeyPath, int, str]]:
    """Walk valid JSON: (whether it is a key, path, column from 1, token) of every key and value."""
    stack: list[list[Any]] = []
    key_next = False
    for match in _JSON_TOKEN.finditer(text):
        token, col = match.group(), match.start() + 1
        if token in "}]":
            stack.pop()
            key_next = False
        elif token == ",":
            key_next = stack[-1][0] == "{"
            if not key_next:
                stack[-1][1] += 1
        elif token == ":":
            continue
        elif key_next:
            stack[-1][1] = json.loads(token)
            key_next = False
            yield True, tuple(level[1] for level in stack), col, token
        else:
            yield False, tuple(level[1] for level in stack), col, token
            if token in "{[":
                stack.append([token, None if token == "{" else 0])
                key_next = token == "{"


def _bad_token(text: str) -> int:
    seen: set[KeyPath] = set()
    for is_key, path, col, token in _scan(text):
        if (is_key and path in seen) or (not is_key and token in _CONSTANTS):
            return col
        if is_key:
            seen.add(path)
    return 1


def _locate(text: str, path: KeyPath) -> int:
    """Column of the value at `path`, or of the nearest value around it."""
    best, depth = 1, 0
    for is_key, here, col, _ in _scan(text):
        if not is_key and len(here) > depth and path[: len(here)] == here:
            best, depth = col, len(here)
    return best


def _text_rows(file: SourceFile, handle: BinaryIO) -> Iterator[RawRow]:
    line, rest = 1, b""
    while True:
        block = rest + handle.read(PIECE_BYTES - len(rest))
        cut = len(block)
        if len(block) == PIECE_BYTES:
            cut = block.rfind(b"\n") + 1 or _character_start(block)
        piece, rest = block[:cut], block[cut:]
        if not piece:
            return
        text_piece = piece.removeprefix(b"\xef\xbb\xbf") if line == 1 else piece
        row = _text_row(file.path, line, text_piece)
        if row is not None:
            yield row
        line += piece.count(b"\n")


def _character_start(block: bytes) -> int:
    cut = len(block)
    for _ in range(3):
        if block[cut - 1] & 0xC0 != 0x80:
            break
        cut -= 1
    return cut - 1


def _text_row(path: Path, line: int, piece: bytes) -> RawRow | None:
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError as error:
        before = piece[: error.start]
        problem = RowProblem(
            f"not UTF-8: byte 0x{piece[error.start]:02x}", len(before.rpartition(b"\n")[2].decode("utf-8")) + 1
        )
        return RawRow(path, line + before.count(b"\n"), piece[:200].decode("utf-8", "replace"), None, problem)
    if not text.strip():
        return None
    position = text.find("\0")
    if position >= 0:
        before_nul = text[:position]
        problem = RowProblem("NUL character", len(before_nul.rpartition("\n")[2]) + 1)
        return RawRow(path, line + before_nul.count("\n"), text[:200], None, problem)
    return RawRow(path, line, text, {"text": text})
