"""Values from the command line, merged into the recipe's tree before anything is checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.config.fields import fields, find, item_fields, list_of
from tuner.config.yaml import KeyPath, Node, Problems, read_yaml, resolve, tree_of

PREFIX = "TUNER_"
"""Of variables of the environment that are tuner's."""


@dataclass(frozen=True)
class Override:
    """One `--section.key value`: `text` is the value as typed, None when the flag came without one."""

    key: str
    text: str | None
    variable: str | None = None
    """The variable of the environment that it comes from, where it is no flag."""

    @property
    def flag(self) -> str:
        """The flag as typed, without its value; of a variable the one that would say the same."""
        return f"--{self.key}"

    @property
    def name(self) -> str:
        """What it is, as messages name it."""
        return f"flag {self.flag}" if self.variable is None else f"variable {self.variable}"

    @property
    def where(self) -> str:
        """The same with its value."""
        text = self.text if self.text is None or len(self.text) <= 60 else self.text[:57] + "..."
        between = " " if self.variable is None else "="
        return self.name if text is None else f"{self.name}{between}{text!s}".replace("\n", "\\n")


def from_environment(variables: Mapping[str, str], typed: Sequence[Override]) -> list[Override]:
    """What variables such as ``TUNER_OPTIMIZER__LR=3e-4`` say of a recipe, less what is typed as flags.

    Two underscores are a dot. A variable without them is none of a recipe's (``TUNER_CACHE``).
    """
    known = {override.key.replace("-", "_") for override in typed}
    found = []
    for name, text in sorted(variables.items()):
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if name.startswith(PREFIX) and "." in key and key not in known:
            found.append(Override(key, text, name))
    return found


def merge(tree: Node, overrides: Sequence[Override], cwd: Path, problems: Problems) -> None:
    """Write every override into the tree, in place; `null` removes what the recipe says."""
    seen: set[str] = set()
    for override in overrides:
        key = override.key.replace("-", "_")
        if key in seen:
            problems.add(override.where, "", "duplicate flag; write it once")
            continue
        seen.add(key)
        if find(key) is None:
            from tuner.config.advice import given_in

            problems.add(override.name, "", unknown(key, override.text, given_in(tree)))
        elif override.text is None:
            problems.add(override.where, "", f"needs a value; write {override.flag} VALUE")
        else:
            _merge_one(tree, key, override, cwd, problems)


def unknown(key: str, text: str | None = None, given: Mapping[str, Any] | None = None) -> str:
    """Return what to say about a flag that is no key of the recipe, with the text after it."""
    inside = [name for name in fields() if name.startswith(f"{key}.")]
    if inside:
        meant = text if inside[0].endswith(".name_or_path") and text else ""
        return f"a section; write --{inside[0]} {meant or 'VALUE'}"
    from tuner.config.advice import of_unknown

    return of_unknown(key, None if text is None else _plain(text), given, as_flags=True)


def _plain(text: str) -> Any:
    """The value that a flag's text is; the text itself where it is no YAML."""
    if not text.lstrip().startswith(("[", "{")):
        return resolve(text)
    problems = Problems()
    found = read_yaml(f"value: {text}", "value", Path(), problems).child("value")
    return text if problems.found or found is None else found.plain()


def _merge_one(tree: Node, key: str, override: Override, cwd: Path, problems: Problems) -> None:
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
    if override.text == "null":
        if path[-1] != "kind" or tree.has(path):
            tree.remove(path)
        return
    node = tree
    for depth, part in enumerate(path[:-1]):
        following = path[depth + 1]
        child = node.child(part)
        if child is None:
            child = Node([] if isinstance(following, int) else {}, override.where, cwd, override.where)
            if not _attach(node, part, child, override, problems):
                return
        elif isinstance(following, int) and not isinstance(child.value, list):
            child.value = [Node(child.value, child.where, child.base, child.key_where)]
        elif not isinstance(following, int) and not isinstance(child.value, dict):
            names = item_fields(list_of(path)) if isinstance(part, int) and isinstance(child.value, str) else {}
            bare = Node(child.value, child.where, child.base, child.key_where)
            child.value = {next(iter(names)): bare} if names else {}
        node = child
    value = _read(key, override, cwd, problems)
    if value is not None:
        _attach(node, path[-1], value, override, problems)


def _attach(parent: Node, key: Any, child: Node, override: Override, problems: Problems) -> bool:
    if isinstance(parent.value, dict):
        parent.value[str(key)] = child
        return True
    if key > len(parent.value):
        problems.add(override.where, "", f"item {key} of {len(parent.value)}; the next one is {len(parent.value)}")
        return False
    parent.value[key : key + 1] = [child]
    return True


def _read(key: str, override: Override, cwd: Path, problems: Problems) -> Node | None:
    text = override.text or ""
    field = find(key)
    flow = text.lstrip().startswith(("[", "{"))
    takes_text = field is not None and field.takes_text
    if field is not None and field.value_type is None and type(resolve(text)) in {int, float}:
        takes_text = False  # no path is a number
    if not flow or (takes_text and field is not None and field.value_type is not None):
        return Node(text if takes_text else resolve(text), override.where, cwd, override.where)
    inner = Problems()
    value = read_yaml(f"value: {text}", "value", cwd, inner).child("value")
    for problem in inner.found:
        problems.add(override.where, "", problem.message)
    return None if inner.found or value is None else tree_of(value.plain(), override.where, cwd)
