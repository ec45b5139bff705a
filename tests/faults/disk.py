"""What a disk may hold after a power loss, from the calls that led to it.

Promised by POSIX, and nothing more is assumed: a file's bytes are there after its flush, and a name after that of
its directory. What was not flushed is there, or not, or in part; a rename alone is all or nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.calls import Call

Mode = Literal["nothing", "names", "data", "zeros", "some"]
MODES: tuple[Mode, ...] = ("nothing", "names", "data", "zeros", "some")
"""What of the unflushed is there: none of it; all names and no bytes; bytes and no names; names, and zeros; a part."""

Image = dict[str, bytes | None | str]
"""Relative path to a file's bytes, None for a directory, the target of a symbolic link."""


@dataclass(eq=False)
class Node:
    """A file, a directory or a link: as programs see it, and as the disk surely has it."""

    directory: bool = False
    target: str = ""
    data: bytes = b""
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Unflushed writes: (offset, bytes); a cut to a length is (length, None) in effect: see `cuts`."""
    cuts: set[int] = field(default_factory=set)
    """Which of `pending` are cuts."""
    names: dict[str, Node] = field(default_factory=dict)
    durable_names: dict[str, Node] = field(default_factory=dict)

    def write(self, offset: int | None, data: bytes) -> None:
        """Write below `offset`, at the end where it is None."""
        at = len(self.data) if offset is None else offset
        self.pending.append((at, data))
        self.data = _written(self.data, at, data)

    def cut(self, length: int) -> None:
        """Truncate or extend."""
        self.cuts.add(len(self.pending))
        self.pending.append((length, b""))
        self.data = _cut(self.data, length)

    def flush(self) -> None:
        """Make the bytes durable."""
        self.durable = self.data
        self.pending.clear()
        self.cuts.clear()

    def after(self, mode: Mode, rng: random.Random) -> bytes:
        """The bytes after a power loss."""
        if mode == "data" or not self.pending:
            return self.data
        if mode == "zeros":
            return self.durable + bytes(max(0, len(self.data) - len(self.durable)))
        if mode in ("nothing", "names"):
            return self.durable
        found = self.durable
        for number in range(rng.randint(0, len(self.pending))):
            at, data = self.pending[number]
            if number in self.cuts:
                found = _cut(found, at)
            elif rng.random() < 0.9:
                found = _written(found, at, data if rng.random() < 0.7 else data[: rng.randint(0, len(data))])
        return found


@dataclass(frozen=True)
class Move:
    """A change of names that is all or nothing: (directory, name, what it is now)."""

    sets: tuple[tuple[Node, str, Node | None], ...]

    def touches(self, keys: set[tuple[int, str | None]]) -> bool:
        """Whether it concerns one of (directory, name); without a name, anything in the directory."""
        return any((id(parent), name) in keys or (id(parent), None) in keys for parent, name, _ in self.sets)


class Disk:
    """A directory tree that calls are applied to."""

    def __init__(self, start: Path, root: Path) -> None:
        self.root = str(root)
        self.top = _load(start)
        self.moves: list[Move] = []

    def apply(self, calls: Iterable[Call]) -> None:
        """Do what the calls did; those that must have failed change nothing."""
        for call in calls:
            self._apply(call)

    @property
    def settled(self) -> bool:
        """Whether nothing is left unflushed."""
        return not self.moves and not any(node.pending for node in _walk(self.top))

    def image(self, mode: Mode, rng: random.Random) -> Image:
        """One of the trees that a power loss may leave."""
        names = {id(node): dict(node.durable_names) for node in _walk(self.top) if node.directory}
        for move in self.moves:
            if mode in ("names", "zeros") or (mode == "some" and rng.random() < 0.5):
                for parent, name, node in move.sets:
                    _set(names.setdefault(id(parent), dict(parent.durable_names)), name, node)
        image: Image = {}

        def lay(node: Node, path: str) -> None:
            if node.target:
                image[path] = node.target
            elif not node.directory:
                image[path] = node.after(mode, rng)
            else:
                image[path] = None
                for name, inner in sorted(names.get(id(node), node.durable_names).items()):
                    lay(inner, f"{path}/{name}" if path else name)

        lay(self.top, "")
        return image

    def _apply(self, call: Call) -> None:
        if call.kind in ("close", "none") or call.path.endswith(" (deleted)"):
            return
        if call.kind in ("map", "allocate"):
            raise NotImplementedError(f"{call.name} of {call.path}: its writes are not seen")
        getattr(self, f"_{call.kind}")(call)

    def _open(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        if parent is None:
            return
        node = parent.names.get(name)
        if node is None and call.flags & os.O_CREAT:
            node = Node()
            self._move((parent, name, node))
        elif node is not None and call.flags & os.O_TRUNC and not (call.flags & os.O_EXCL) and node.data:
            node.cut(0)

    def _write(self, call: Call) -> None:
        node = self._find(call.path)
        if node is not None and call.data is not None:
            node.write(call.offset, call.data)

    _copy = _write

    def _truncate(self, call: Call) -> None:
        node = self._find(call.path)
        if node is not None and len(node.data) != call.size:
            node.cut(call.size)

    def _flush(self, call: Call) -> None:
        node = self._find(call.path)
        if node is None:
            return
        if not node.directory:
            node.flush()
            return
        keys: set[tuple[int, str | None]] = {(id(node), None)}
        flushed: list[Move] = []
        for move in reversed(self.moves):  # and what an earlier move did to a name that goes with it
            if move.touches(keys):
                flushed.insert(0, move)
                keys |= {(id(parent), name) for parent, name, _ in move.sets}
        for move in flushed:
            for parent, name, inner in move.sets:
                _set(parent.durable_names, name, inner)
        self.moves = [move for move in self.moves if move not in flushed]

    def _mkdir(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        if parent is not None and name not in parent.names:
            made = Node(directory=True) if call.kind == "mkdir" else Node(target=call.other or "?")
            self._move((parent, name, made))

    _symlink = _mkdir

    def _unlink(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        node = None if parent is None else parent.names.get(name)
        if parent is not None and node is not None and node.directory == (call.kind == "rmdir") and not node.names:
            self._move((parent, name, None))

    _rmdir = _unlink

    def _rename(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        other, new = self._parent(call.other)
        if parent is not None and other is not None and name in parent.names:
            self._move((parent, name, None), (other, new, parent.names[name]))

    def _link(self, call: Call) -> None:
        node, (other, new) = self._find(call.path), self._parent(call.other)
        if node is not None and other is not None and new not in other.names:
            self._move((other, new, node))

    def _move(self, *sets: tuple[Node, str, Node | None]) -> None:
        for parent, name, node in sets:
            _set(parent.names, name, node)
        self.moves.append(Move(sets))

    def _find(self, path: str) -> Node | None:
        node: Node | None = self.top
        for name in filter(None, path.removeprefix(self.root).split("/")):
            node = node.names.get(name) if node is not None else None
        return node

    def _parent(self, path: str) -> tuple[Node | None, str]:
        parent, _, name = path.rpartition("/")
        return self._find(parent), name


def lay_out(image: Image, root: Path) -> None:
    """Write an image as a directory."""
    for path, content in image.items():
        place = root / path
        if content is None:
            place.mkdir(exist_ok=True)
        elif isinstance(content, str):
            place.symlink_to(content)
        else:
            place.write_bytes(content)


def _load(path: Path) -> Node:
    if path.is_symlink():
        return Node(target=os.readlink(path))
    if path.is_dir():
        names = {inner.name: _load(inner) for inner in path.iterdir()}
        return Node(directory=True, names=names, durable_names=dict(names))
    data = path.read_bytes()
    return Node(data=data, durable=data)


def _walk(node: Node) -> Iterable[Node]:
    """Every node that is or was there."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting += [*current.names.values(), *current.durable_names.values()]


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _written(before: bytes, at: int, data: bytes) -> bytes:
    padded = before + bytes(max(0, at - len(before)))
    return padded[:at] + data + padded[at + len(data) :]


def _cut(before: bytes, length: int) -> bytes:
    return before[:length] + bytes(max(0, length - len(before)))
