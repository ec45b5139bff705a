"""YAML 1.2 with positions, as a tree of plain values that knows where each of them came from.

`1e-5` is a number, `no` is text, and what could surprise is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tuner.config.value_types import shown
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

    found: dict[Problem, None] = field(default_factory=dict)
    """Each once."""

    def add(self, where: str, key: str, text: str) -> None:
        """Note one problem; the same position and key are noted once."""
        self.take([Problem.at(where, key, " ".join(text.split()))])

    def take(self, problems: Iterable[Problem]) -> None:
        """Note problems that were found before."""
        self.found |= dict.fromkeys(problems)


MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NODES = 10_000

_MEANT = {None: ("", "~", "null", "Null", "NULL"), True: ("true", "True", "TRUE"), False: ("false", "False", "FALSE")}
_WORDS = {word: value for value, words in _MEANT.items() for word in words}
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_BASED = re.compile(r"0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,60}|[0-9]{1,60}(\.[0-9]{0,60})?)([eE][-+]?[0-9]{1,4})?")
_PLAIN = re.compile(r"[A-Za-z0-9/_]([A-Za-z0-9/_.% -]*[A-Za-z0-9/_.%-])?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def resolve(text: str) -> Any:
    """Return the value of a plain scalar under YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def one_line(text: str) -> str:
    """A text on one line, without what is no plain character."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


def flow(value: Any) -> str:
    """Write one value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(str(key))}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return repr(value)
    return shown(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and resolve(text) == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def read_yaml(text: str, name: str, base: Path, problems: Problems) -> Node:
    """Build the tree of one YAML document; whatever is wrong goes to `problems`, with its line and column.

    `name` is the file as shown to people. The result is an empty mapping when the text is not YAML at all.
    """
    empty = Node({}, f"{name}:1:1", base, f"{name}:1:1")
    if len(text) > MAX_BYTES:
        problems.add(f"{name}:1:1", "", f"larger than {MAX_BYTES:,} characters: not a recipe")
        return empty
    return _Builder(name, base, problems).build(text) or empty


@cache
def package_table(name: str) -> Any:
    """The plain values of a YAML file of this package, such as `not_supported`, read when they are first asked for.

    They answer what is wrong and what is imported: a recipe that is right needs none of them.
    """
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(Path(__file__).with_name(f"{name}.yaml"))


class _Stop(Exception):
    """The document cannot be read on; the reason is among the problems."""


class _Builder:
    """Builds nodes from the parser's events, without recursion into the parser's own loader."""

    def __init__(self, name: str, base: Path, problems: Problems) -> None:
        self.name, self.base, self.problems = name, base, problems

    def build(self, text: str) -> Node | None:
        from ruamel import yaml

        root: Node | None = None
        try:
            events = self._checked(yaml.YAML(typ="safe", pure=True).parse(text))
            for event in events:
                if type(event).__name__ == "DocumentStartEvent":
                    if root is not None:
                        self._fail(event, "a second document; a recipe is one document")
                    root = self._node(next(events), events, ())
        except _Stop:
            return None
        except yaml.error.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else f"{self.name}:1:1"
            hint = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
            self.problems.add(where, "", f"not YAML: {error.problem or error.context}{hint}")
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            column = error.position - text.rfind("\n", 0, error.position)
            self.problems.add(f"{self.name}:{line}:{column}", "", f"not YAML: control character {error.character!r}")
        except (yaml.error.YAMLError, ValueError, RecursionError) as error:
            self.problems.add(f"{self.name}:1:1", "", f"not YAML: {(str(error).splitlines() or ['too deep'])[0]}")
        if root is None or isinstance(root.value, dict):
            return root
        if root.value is not None:
            self.problems.add(root.where, "", "a recipe is a mapping of sections, such as model: and data:")
        return None

    def _where(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"

    def _fail(self, event: Any, text: str) -> NoReturn:
        self.problems.add(self._where(event), "", text)
        raise _Stop

    def _checked(self, events: Iterator[Any]) -> Iterator[Any]:
        for number, event in enumerate(events, 1):
            if number > MAX_NODES:
                self._fail(event, f"more than {MAX_NODES:,} values: not a recipe")
            if type(event).__name__ == "AliasEvent":
                self._fail(event, f"alias *{event.anchor}; write the value out, a recipe has no aliases")
            if getattr(event, "anchor", None) is not None:
                self._fail(event, f"anchor &{event.anchor}; write the value out, a recipe has no anchors")
            if getattr(event, "tag", None) is not None:
                self._fail(event, f"tag {event.tag}; a recipe has no tags")
            yield event

    def _node(self, event: Any, events: Iterator[Any], path: KeyPath) -> Node:
        if len(path) > MAX_DEPTH:
            self._fail(event, f"nested more than {MAX_DEPTH} deep")
        kind = type(event).__name__
        if kind == "MappingStartEvent":
            return self._mapping(event, events, path)
        if kind == "SequenceStartEvent":
            items: list[Node] = []
            while type(item := next(events)).__name__ != "SequenceEndEvent":
                items.append(self._node(item, events, (*path, len(items))))
            return Node(items, self._where(event), self.base)
        plain = event.style in {None, ""}
        return Node(resolve(event.value) if plain else event.value, self._where(event), self.base)

    def _mapping(self, event: Any, events: Iterator[Any], path: KeyPath) -> Node:
        children: dict[str, Node] = {}
        while type(key := next(events)).__name__ != "MappingEndEvent":
            if type(key).__name__ != "ScalarEvent":
                self._fail(key, "a key is plain text")
            where = self._where(key)
            child = self._node(next(events), events, (*path, key.value))
            child.key_where = where
            if key.value in children:
                first = children[key.value].key_where.rsplit(":", 2)[1]
                self.problems.add(where, dotted((*path, key.value)), f"duplicate key; first written on line {first}")
            else:
                children[key.value] = child
        return Node(children, self._where(event), self.base)
