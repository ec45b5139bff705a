"""Plain text files: a document a file, in pieces of bounded size."""

from collections.abc import Iterator

from tuner.data.reading.block import BLOCK_BYTES, BOM, SHOWN_BYTES, Block, RawRecord, text_of
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.streams import open_stream
from tuner.data.sources import SourceFile


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
    cut = len(piece)
    for _ in range(3):
        if piece[cut - 1] & 0xC0 != 0x80:
            break
        cut -= 1
    return cut - 1


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
