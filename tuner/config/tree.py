"""A recipe as it was written: a tree of plain values that knows where each of them came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import Problem

Key = str | int
KeyPath = tuple[Key, ...]


@dataclass
class Node:
    """One value: a scalar, a list of nodes or a mapping to nodes.

    `where` says where the value is written and `key_where` where its key is, as shown to people (`recipe.yaml:3:5`);
    `base` is the directory that a relative path in it starts from.
    """

    value: Any
    where: str
    base: Path
    key_where: str = ""

    @property
    def is_flag(self) -> bool:
        """Whether a flag of the command line gave the value."""
        return self.where.startswith("flag --")

    def plain(self) -> Any:
        """Return the value with plain Python containers."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def at(self, path: KeyPath) -> Node:
        """Return the node at a path, or its nearest existing ancestor."""
        node = self
        for key in path:
            child = node.child(key)
            if child is None:
                return node
            node = child
        return node

    def child(self, key: Key) -> Node | None:
        """Return one child, if there is one."""
        if isinstance(self.value, dict):
            found: Node | None = self.value.get(str(key))
            return found
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            element: Node = self.value[key]
            return element
        return None

    def has(self, path: KeyPath) -> bool:
        """Whether something is written at a path."""
        node: Node | None = self
        for key in path:
            node = node.child(key) if node is not None else None
        return node is not None

    def remove(self, path: KeyPath) -> None:
        """Remove what is written at a path; nothing happens when nothing is."""
        if not path or not self.has(path):
            return
        parent = self.at(path[:-1])
        if isinstance(parent.value, dict):
            parent.value.pop(str(path[-1]))
        elif isinstance(path[-1], int):
            parent.value.pop(path[-1])

    def leaves(self, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """Yield every scalar and empty container with its path."""
        if isinstance(self.value, dict) and self.value:
            for key, child in self.value.items():
                yield from child.leaves((*prefix, key))
        elif isinstance(self.value, list) and self.value:
            for index, child in enumerate(self.value):
                yield from child.leaves((*prefix, index))
        else:
            yield prefix, self


def dotted(path: KeyPath) -> str:
    """Write a path as flags and messages do: `data.train.0.path`."""
    return ".".join(str(key) for key in path)


def tree_of(value: Any, where: str, base: Path, depth: int = 0) -> Node:
    """Build a tree from plain Python values; ValueError when nested too deeply."""
    if depth > 20:
        raise ValueError("nested more than 20 deep")
    if isinstance(value, Mapping):
        children = {str(key): tree_of(child, where, base, depth + 1) for key, child in value.items()}
        return Node(children, where, base, where)
    if isinstance(value, (list, tuple)):
        return Node([tree_of(child, where, base, depth + 1) for child in value], where, base, where)
    return Node(str(value) if isinstance(value, Path) else value, where, base, where)


@dataclass
class Problems:
    """Everything wrong with one recipe, in order."""

    found: list[Problem] = field(default_factory=list)
    seen: set[Problem] = field(default_factory=set)

    def add(self, where: str, key: str, text: str) -> None:
        """Note one problem; the same position and key are noted once."""
        self.take([Problem.at(where, key, " ".join(text.split()))])

    def take(self, problems: Iterable[Problem]) -> None:
        """Note problems that were found before."""
        for problem in problems:
            if problem not in self.seen:
                self.seen.add(problem)
                self.found.append(problem)
