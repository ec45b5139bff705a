"""Where records come from: the recipe's sources as files, each with how it is read and a hash of what is in it.

Sources may be read in portions, one after the other: each is prepared data of its own, under a key of its own. Which
one is next is said by the section that divides them (``DataSection.portions``).
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuner.config.portions import Late, Portion
from tuner.errors import DataError
from tuner.runtime.dist import cores
from tuner.runtime.files import reading

if TYPE_CHECKING:
    from tuner.config.recipe import DataSection, DataSource
    from tuner.data.id_arrays import IdArray
    from tuner.data.reading.data_sets import SplitFiles


Kind = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow", "ids"]
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".npy": "ids",
    ".txt": "text", ".text": "text", ".md": "text", ".markdown": "text", ".rst": "text",
}  # fmt: skip
Compression = Literal["", "gzip", "zstd"]
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
INDEX = ".idx"
"""Next to a `.bin` file of token ids: where Megatron's documents lie in it."""
_MAGIC = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_SLICE = re.compile(r"(?s)(.+)\[([^\[\]]*)\]")
_WITH_SPLIT = re.compile(r"(?s)(.+):([A-Za-z0-9][\w.+-]*)(?:\[([^\[\]]*)\])?")
_COPY_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
_MOST_THREADS = 8
"""More would read faster than disks do."""


@dataclass(frozen=True)
class SourceFile:
    """One file of records and how it is read; it travels to worker processes with each of its blocks."""

    path: Path
    """What is read; of a data set, its directory or its first file."""
    kind: Kind
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    """(ours, theirs), sorted."""
    weight: float = 1.0
    count: int | None = None
    source: int = 0
    """Which of the recipe's sources it belongs to: weight and count are of all its files together."""
    name: str = ""
    """What messages call it."""
    compression: Compression = ""
    parts: tuple[Path, ...] = ()
    """The Arrow files of a data set, in order."""
    records: tuple[int, int] | None = None
    """Records [start, stop) of a data set that are read; None is all."""
    part: str = ""
    """A slice of a file's records, such as `:10%`."""
    end_token: bool = True
    """Whether the end token follows each plain text."""
    array: IdArray | None = None
    """Where the ids lie, of an array of them."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that is read."""
        return self.parts or (self.path,)

    def size(self) -> int:
        """Bytes on disk. DataError."""
        with source_errors(self):
            return sum(path.stat().st_size for path in self.paths)

    def identity(self) -> list[Any]:
        """What decides the records, as JSON values: how it is read, its share, and a digest of its bytes. DataError.

        Names and places of files do not count.
        """
        with source_errors(self):
            digest = hashlib.sha256(b"".join(map(content_digest, self.paths)))
        shared = self.weight != 1 or self.count is not None
        return [
            self.kind, self.compression, self.format, [list(pair) for pair in self.columns],
            self.weight, self.count, self.source if shared else None,
            None if self.records is None else list(self.records), digest.hexdigest(),
            *([self.part] if self.part else []),
            *([] if self.end_token else ["without end_token"]),
            *([] if self.array is None else astuple(self.array)),
        ]  # fmt: skip


def content_digest(path: Path) -> bytes:
    """SHA-256 over those of a file's pieces of 16 MiB, of which several threads hash one each. OSError."""
    size = path.stat().st_size
    pieces = range(0, max(size, 1), _PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        read = functools.partial(_piece_digest, file.fileno())
        if len(pieces) == 1:
            digests = [read(0)]
        else:
            with ThreadPoolExecutor(min(cores(), _MOST_THREADS, len(pieces))) as threads:
                digests = list(threads.map(read, pieces))
    return hashlib.sha256(b"".join(digests)).digest()


def _piece_digest(descriptor: int, start: int) -> bytes:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_COPY_BYTES))
    stop = start + _PIECE_BYTES
    while start < stop and (count := os.preadv(descriptor, [buffer[: stop - start]], start)):
        digest.update(buffer[:count])
        start += count
    return digest.digest()


@contextmanager
def source_errors(file: SourceFile) -> Iterator[None]:
    """Have an OSError within raised as the DataError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file.name}: {error.strerror or error}") from error


def expand(sources: Sequence[DataSource], cache: Path | None = None) -> list[SourceFile]:
    """Return the files of the recipe's sources, in order; those of a directory or a glob are sorted by name.

    Standard input, and what code yields, is copied to a file: a temporary one, once for the process, or one in the
    ``cache`` where the code has a key for it. PluginError for such code, DataError for what is not there or of an
    unknown kind, MachineError for a hub data set that cannot be fetched.
    """
    if sum(source.path == "-" for source in sources) > 1:
        raise DataError("two sources read standard input", hint="name it once")
    return [file for index, source in enumerate(sources) for file in _of_its_kind(source, index, cache)]


def _of_its_kind(source: DataSource, index: int, cache: Path | None) -> list[SourceFile]:
    files = _expand(source, index, cache)
    for file in files:
        if file.array is None and (source.dtype != "auto" or source.end_id != "auto"):
            raise DataError(f"{file.name}: dtype and end_id are of arrays of token ids", hint="remove them")
        if file.array is not None and (source.columns or source.format not in {"auto", "tokens"}):
            raise DataError(f"{file.name}: an array of token ids has no format and no columns", hint="remove them")
        if file.array is not None and not source.end_token:
            raise DataError(f"{file.name}: nothing is put after the documents of an array", hint="remove end_token")
    return files


def _expand(source: DataSource, index: int, cache: Path | None) -> list[SourceFile]:
    if source.use is not None:
        from tuner.data.reading.spool import made

        return [_source_file(made(source.use, source.args, cache), "jsonl", source, index, name=source.use)]
    if source.path == "-":
        from tuner.data.reading.spool import spooled

        return [_file(spooled(), source, index, "-")]
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _directory(path, source, index)
    if path.is_file():
        return [_file(path, source, index, str(path))]
    if (cut := local_slice(source.path)) is not None:
        return [_part(_file(cut[0], source, index, str(cut[0])), cut[1], source.path)]
    names = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(str(path)) else []
    if found := [name for name in names if Path(name).is_file()]:
        return [_file(Path(name), source, index, name) for name in found]
    split = _WITH_SPLIT.fullmatch(source.path)
    if split is not None:
        from tuner.data.reading.data_sets import named_split

        return [_table(named_split(split[1], split[2], split[3], source.path), source, index)]
    if path.exists():
        raise DataError(f"{path}: not a regular file", hint="to read a pipe, write - and redirect standard input to it")
    hint = "a path starts from the recipe's directory; for a hub data set write owner/name:split, such as :train"
    raise DataError(f"{source.path}: no such file", hint=hint)


def local_slice(text: str) -> tuple[Path, str] | None:
    """The file that a path such as `rows.jsonl[:10%]` is a slice of, and the slice; None where it is none."""
    found = _SLICE.fullmatch(text)
    path = None if found is None else Path(found[1]).expanduser()
    return (path, found[2]) if found is not None and path is not None and path.is_file() else None


def _part(file: SourceFile, part: str, name: str) -> SourceFile:
    """A slice of a file: of its records, of an array of its ids. DataError."""
    from tuner.data.reading.data_sets import UNCOUNTED, records_in

    if file.array is not None and not file.array.sequences:
        start, stop = records_in(part, file.array.count, name) or (0, 0)
        return replace(file, array=file.array.within(start, stop))
    if file.kind == "text" or file.array is not None:
        what = "a plain text is one document" if file.array is None else "an array with an index is used as a whole"
        raise DataError(f"{name}: {what}: it has no slices")
    records_in(part, UNCOUNTED, name)
    return replace(file, part=part)


def _directory(path: Path, source: DataSource, index: int) -> list[SourceFile]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        from tuner.data.reading.data_sets import saved_directory

        if (table := saved_directory(path, source.path)) is not None:
            return [_table(table, source, index)]
    found = [Path(name) for name in sorted(_walk(path)) if _kind_of(Path(name)) is not None]
    if not found:
        raise DataError(f"{path}: no file of a known kind in it", hint=f"known: {', '.join(_KINDS)}")
    return [_file(name, source, index, str(name)) for name in found]


def _walk(directory: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _kind_of(path: Path) -> tuple[Kind, Compression] | None:
    suffix = path.suffix.lower()
    compression: Compression = _COMPRESSIONS.get(suffix, "")
    by_name = _KINDS.get(Path(path.stem).suffix.lower() if compression else suffix)
    kind: Kind | None = by_name if _index_of(path) is None else "ids"
    return None if kind is None or (compression and kind in {"parquet", "arrow", "ids"}) else (kind, compression)


def _index_of(path: Path) -> Path | None:
    index = path.with_suffix(INDEX)
    return index if path.suffix == ".bin" and index.is_file() else None


def _file(path: Path, source: DataSource, index: int, name: str) -> SourceFile:
    known = _kind_of(path)
    if source.dtype != "auto" or (known is not None and known[0] == "ids"):
        return _array(path, source, index, name)
    if name == "-" or (known is None and source.format != "auto"):
        known = ("text" if source.format == "text" else "jsonl"), _sniffed(path)
    if known is None:
        raise DataError(
            f"{path}: unknown kind of file {path.suffix.lower() or '(no suffix)'}",
            hint=f"known: {', '.join(_KINDS)}, with .gz or .zst after the text ones; or give {{path, format}}",
        )
    parts = (path,) if known[0] == "arrow" else ()
    return _source_file(path, known[0], source, index, name=name, compression=known[1], parts=parts)


def _array(path: Path, source: DataSource, index: int, name: str) -> SourceFile:
    """An array of ids; what parts and cuts it may not be known yet."""
    from tuner.data.id_arrays import opened

    index_file = _index_of(path)
    with reading(path):
        array = opened(path, index_file, source.dtype, source.end_id)
    parts = () if index_file is None else (path, index_file)
    return _source_file(path, "ids", source, index, name=name, parts=parts, array=array)


def _table(table: SplitFiles, source: DataSource, index: int) -> SourceFile:
    """A split of a data set."""
    more = {"name": source.path, "parts": table.files, "records": table.records}
    return _source_file(table.path, "arrow", source, index, **more)


def _source_file(path: Path, kind: Kind, source: DataSource, index: int, **more: Any) -> SourceFile:
    columns = tuple(sorted(source.columns.items()))
    more["end_token"] = source.end_token
    return SourceFile(path, kind, source.format, columns, source.weight, source.count, index, **more)


def _sniffed(path: Path) -> Compression:
    with reading(path), path.open("rb") as file:
        head = file.read(4)
    return "gzip" if head.startswith(_MAGIC["gzip"]) else "zstd" if head == _MAGIC["zstd"] else ""


def next_portion(data: DataSection, done: Sequence[Portion], passes: int | None = 1) -> Portion | Late | None:
    """The portion after those that are done or left out; None where there are no more. Raises DataError.

    It is late, too, as long as held-out rows of its own are not there.
    """
    divided = data.portions
    assert divided is not None  # asked of divided data alone
    found = divided.next_portion(data.train, done, _files, passes)
    if isinstance(found, Portion) and isinstance(data.eval, tuple):
        for written, source in zip(data.eval, divided.sources_of(data.eval, found.name), strict=True):
            if divided.may_come_later(written) and not _files(source, False):
                return Late(found.name, f"{source.path}: no such file")
    return found


def first_portion(data: DataSection) -> Portion | None:
    """The first portion, for whoever looks at data without training on it; None where data are not divided.

    Raises DataError where it is not there.
    """
    if data.portions is None:
        return None
    found, noun = next_portion(data, ()), data.portions.noun
    if isinstance(found, Late):
        raise DataError(f"{noun} {found.name}: {found.missing}", hint=f"the first {noun} is not there yet")
    assert found is not None  # there is a name, or a file
    return found


def _files(source: DataSource, needed: bool) -> list[str]:
    """The files of a source by name; none where it is not there, unless they are `needed`. DataError."""
    path = Path(source.path)
    if not needed and not path.is_file() and local_slice(source.path) is None and not _lists_any(path):
        return []
    return [str(file.path) for file in expand([source])]


def _lists_any(path: Path) -> bool:
    """Whether a directory has a file whose name is not hidden, or a glob finds one."""
    if path.is_dir():
        return any(file.is_file() and file.suffix and not file.name.startswith(".") for file in path.rglob("*"))
    return any(Path(name).is_file() for name in glob.glob(str(path), recursive=True))
