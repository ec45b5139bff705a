"""The system calls that change files, in words: which file, how many bytes, and with `data` the bytes themselves."""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.faults.notify import Notice, Rule

AT_FDCWD = -100
AT_REMOVEDIR = 0x200
MAP_SHARED, PROT_WRITE = 1, 2
WRITABLE = os.O_WRONLY | os.O_RDWR
OPENS = WRITABLE | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Shape:
    """A call: what it does, and where its arguments are; places are numbers of arguments."""

    name: str
    kind: str
    at: tuple[tuple[int | None, int], ...] = ()
    """(directory's descriptor, path) of each path; without a descriptor, below the working directory."""
    descriptor: int | None = None
    size: int | None = None
    flags: int | None = None


SHAPES: dict[int, Shape] = {
    number: Shape(**{**fields, "at": tuple(map(tuple, fields.get("at", ())))})
    for number, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
"""By number, on x86-64."""

_STANDARD = 2
_CONDITIONS: dict[str, Rule] = {
    "open": Rule(2, argument=1, mask=OPENS), "openat": Rule(257, argument=2, mask=OPENS),
    "write": Rule(1, argument=0, above=_STANDARD), "mmap": Rule(9, argument=2, mask=PROT_WRITE, second=(3, MAP_SHARED)),
}
RULES = tuple(_CONDITIONS.get(shape.name, Rule(number)) for number, shape in SHAPES.items())
"""Every call above, but for opening to read, and writing to the standard streams."""

SPACE = frozenset({"write", "copy", "allocate", "mkdir", "symlink", "link", "rename"})
"""Kinds that a full disk refuses; so is an open that creates."""


@dataclass(frozen=True)
class Call:
    """One system call: its name, what it does, and the absolute path that it does it to."""

    name: str
    kind: str
    path: str
    other: str = ""
    """The new name of a rename or a link."""
    size: int = 0
    offset: int | None = None
    """Where a write begins; None at the file's end."""
    flags: int = 0
    data: bytes | None = None

    @property
    def creates(self) -> bool:
        """Whether an open makes or empties the file."""
        return self.kind == "open" and bool(self.flags & (os.O_CREAT | os.O_TRUNC))


def understand(notice: Notice, data: bool = False) -> Call:
    """The call behind a notice; while its thread waits, everything it points to is as it will be seen."""
    shape, arguments, thread = SHAPES[notice.number], notice.arguments, notice.thread
    kind = shape.kind
    size = arguments[shape.size] if shape.size is not None else 0
    flags = arguments[shape.flags] & 0xFFFFFFFF if shape.flags is not None else 0
    if shape.name == "creat":
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    elif shape.name == "openat2":
        flags = struct.unpack("Q", memory(thread, arguments[2], 8))[0]
    elif shape.name == "unlinkat" and flags & AT_REMOVEDIR:
        kind = "rmdir"
    if shape.descriptor is None:
        paths = [_path_at(thread, arguments, place) for place in shape.at]
        return Call(shape.name, kind, paths[0] if paths else "", paths[1] if len(paths) > 1 else "", size, flags=flags)
    descriptor = _signed(arguments[shape.descriptor])
    path = _target(thread, descriptor)
    if not path.startswith("/"):
        return Call(shape.name, kind, path, size=size)
    if kind == "close":
        return Call(shape.name, kind, path, flags=position(thread, descriptor)[1])
    if kind not in ("write", "copy"):
        return Call(shape.name, kind, path, size=size)
    vectors = _vectors(thread, arguments) if shape.size is None else [(arguments[1], size)]
    if kind == "write":
        size = sum(length for _, length in vectors)
    at, opened = position(thread, descriptor)
    offset = None if opened & os.O_APPEND else arguments[3] if shape.name.startswith("pwrite") else at
    if data and kind == "write":
        content = b"".join(memory(thread, address, length) for address, length in vectors)
        return Call(shape.name, kind, path, size=size, offset=offset, data=content)
    if data:
        content = _copied(thread, shape.name, arguments, size)
        return Call(shape.name, kind, path, size=len(content), offset=offset, data=content)
    return Call(shape.name, kind, path, size=size, offset=offset)


def position(thread: int, descriptor: int) -> tuple[int, int]:
    """The offset and the flags of an open file."""
    facts = dict(line.split(":", 1) for line in Path(f"/proc/{thread}/fdinfo/{descriptor}").read_text().splitlines())
    return int(facts["pos"]), int(facts["flags"], 8)


def memory(thread: int, address: int, length: int) -> bytes:
    """Bytes of another process."""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as file:
        file.seek(address)
        return file.read(length)


def _copied(thread: int, name: str, arguments: tuple[int, ...], size: int) -> bytes:
    """What a copy between descriptors will write."""
    source = _signed(arguments[1] if name == "sendfile" else arguments[0])
    pointer = arguments[2] if name == "sendfile" else arguments[1]
    start = struct.unpack("q", memory(thread, pointer, 8))[0] if pointer else position(thread, source)[0]
    with open(f"/proc/{thread}/fd/{source}", "rb", buffering=0) as file:
        file.seek(start)
        return file.read(min(size, 1 << 30))


def _vectors(thread: int, arguments: tuple[int, ...]) -> list[tuple[int, int]]:
    packed = memory(thread, arguments[1], 16 * arguments[2])
    return [struct.unpack_from("QQ", packed, 16 * i) for i in range(arguments[2])]


def _path_at(thread: int, arguments: tuple[int, ...], place: tuple[int | None, int]) -> str:
    directory, name = place
    path = _text(thread, arguments[name])
    if path.startswith("/"):
        return os.path.normpath(path)
    number = AT_FDCWD if directory is None else _signed(arguments[directory])
    base = os.readlink(f"/proc/{thread}/cwd") if number == AT_FDCWD else _target(thread, number)
    return os.path.normpath(os.path.join(base, path))


def _text(thread: int, address: int) -> str:
    """A C string; a page is read at a time, since the next one may not be there."""
    found = b""
    while b"\0" not in found:
        found += memory(thread, address + len(found), 4096 - (address + len(found)) % 4096)
    return os.fsdecode(found.partition(b"\0")[0])


def _target(thread: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{thread}/fd/{descriptor}")
    except OSError:
        return ""


def _signed(value: int) -> int:
    return struct.unpack("i", struct.pack("I", value & 0xFFFFFFFF))[0]
