"""YAML 1.2 with positions: `1e-5` is a number, `no` is text, and what could surprise is refused."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tuner.config.tree import KeyPath, Node, Problems, dotted

MAX_BYTES = 1 << 20
MAX_DEPTH = 20
MAX_NODES = 10_000

_MEANT = {None: ("", "~", "null", "Null", "NULL"), True: ("true", "True", "TRUE"), False: ("false", "False", "FALSE")}
_WORDS = {word: value for value, words in _MEANT.items() for word in words}
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_BASED = re.compile(r"0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]{1,60}|[0-9]{1,60}(\.[0-9]{0,60})?)([eE][-+]?[0-9]{1,4})?")
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
        self.nodes = 0

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
            column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
            self.problems.add(f"{self.name}:{line}:{column}", "", f"not YAML: control character {error.character!r}")
        except (yaml.error.YAMLError, ValueError, RecursionError) as error:
            self.problems.add(f"{self.name}:1:1", "", f"not YAML: {(str(error).splitlines() or ['too deep'])[0]}")
        if root is not None and root.value is None:
            return None
        if root is not None and not isinstance(root.value, dict):
            self.problems.add(root.where, "", "a recipe is a mapping of sections, such as model: and data:")
            return None
        return root

    def _where(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"

    def _fail(self, event: Any, text: str) -> NoReturn:
        self.problems.add(self._where(event), "", text)
        raise _Stop

    def _checked(self, events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            self.nodes += 1
            if self.nodes > MAX_NODES:
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
