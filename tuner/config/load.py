"""Loading a recipe: read, merge the flags, resolve paths, check; and writing it back, so that it loads to the same one.

Nothing is created, opened or initialised.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.check import check
from tuner.config.fields import Field, fields, find, item_fields, list_of
from tuner.config.paths import recipes_dir, resolve_paths, with_urls
from tuner.config.recipe import NAME, SECTIONS, EvalSection, Recipe
from tuner.config.shipped import shipped_recipes, ships
from tuner.config.yaml import MAX_BYTES, KeyPath, Node, Problems, dotted, flow, one_line, read_yaml, resolve, tree_of
from tuner.errors import Problem, RecipeError

MARKS = 3
"""Keys that only one other tool has, by which a file is recognised as its configuration."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with absolute paths, and where it came from.

    `path` is None when it was given as a mapping; `text` is the file as it stands; `origins` maps each written key
    (`optimizer.lr`) to where it is written (`recipe.yaml:7:7`, `flag --optimizer.lr 3e-4`); others have their default.
    """

    recipe: Recipe
    path: Path | None
    directory: Path
    text: str
    origins: dict[str, str]

    if not TYPE_CHECKING:  # for people at a prompt: typed code says `.recipe.optimizer`

        def __getattr__(self, name: str) -> Any:
            """A section or key of the recipe itself, such as `optimizer`."""
            if not name.startswith("_") and name in Recipe.model_fields:
                return getattr(self.recipe, name)
            known = ", ".join(Recipe.model_fields)
            raise AttributeError(f"a loaded recipe has no {name!r}; its .recipe has {known}")


@dataclass(frozen=True)
class RecipeText:
    """The YAML of a recipe that is in no file, with the name that messages give it."""

    text: str
    name: str = "stdin"


Source = Path | str | RecipeText | Mapping[str, Any] | None
"""A file, a shipped recipe's name, a text, a mapping, or None for overrides alone."""


@dataclass(frozen=True)
class ReadRecipe:
    """A recipe as far as it could be read: where there are problems, without the keys that have them."""

    loaded: LoadedRecipe | None
    """None where nothing could be made of it."""
    problems: tuple[Problem, ...]
    hint: str | None = None

    def whole(self) -> LoadedRecipe:
        """The recipe. Raises RecipeError with all problems, one line each, in `.problems`, where there is one."""
        if self.loaded is None or self.problems:
            raise RecipeError.of(self.problems, self.hint)
        return self.loaded


def load_recipe(source: Source = None, overrides: Sequence[Override] = (), cwd: Path | None = None) -> LoadedRecipe:
    """Load a recipe from a file, a shipped recipe's name, its text, a mapping, or (None) from overrides alone.

    Relative paths start from the file's directory, those of texts, overrides and mappings from `cwd`.
    Raises RecipeError with all problems, one line each, in `.problems`.
    """
    return read_recipe(source, overrides, cwd).whole()


def read_recipe(source: Source = None, overrides: Sequence[Override] = (), cwd: Path | None = None) -> ReadRecipe:
    """Read a recipe as :func:`load_recipe` does, and return its problems with what is right of it.

    Raises RecipeError where there is no such file.
    """
    cwd = Path(os.path.abspath(cwd or Path.cwd()))
    problems = Problems()
    path: Path | None = None
    if source is None or isinstance(source, Mapping):
        tree, text, stem = _from_mapping(source or {}, cwd, problems), "", "run"
    elif isinstance(source, RecipeText):
        tree, text, stem = read_yaml(source.text, source.name, cwd, problems), source.text, "run"
    else:
        path = _locate(source, cwd)
        text = _read_text(path, _display(path, cwd), problems)
        tree, stem = read_yaml(text, _display(path, cwd), path.parent, problems), path.stem
        if path.parent == recipes_dir():  # its paths start from the working directory, unless the file ships with it
            for _, node in tree.leaves():
                node.base = node.base if ships(path.parent, node) else cwd
    unreadable = bool(problems.found) and not tree.value
    if not unreadable:
        merge(tree, overrides, cwd, problems)
        _name(tree, stem, cwd)
        _output_dir(tree, cwd)
        resolve_paths(tree, problems)
    recipe = None if unreadable else check(tree, problems)
    hint = _of_other_tool(tree, path, cwd) if problems.found else None
    if recipe is None:
        return ReadRecipe(None, tuple(problems.found), hint)
    origins = {dotted(key): node.where for key, node in tree.leaves() if node.where != "default"}
    if not text and not problems.found:
        text = recipe_yaml(recipe)
    loaded = LoadedRecipe(recipe, path, path.parent if path else cwd, text, origins)
    return ReadRecipe(loaded, tuple(problems.found), hint)


def _of_other_tool(tree: Node, path: Path | None, cwd: Path) -> str | None:
    """The hint for a file that is a whole configuration of another tool."""
    from tuner.config.other_configs import detect, dialects

    keys = frozenset(tree.value) - Recipe.model_fields.keys()
    tool = detect(keys)
    if tool is None or path is None or len(keys & dialects()[tool].marks) < MARKS:
        return None
    return f"a configuration of {dialects()[tool].title}? convert it: tuner import {_display(path, cwd)} > recipe.yaml"


def _from_mapping(source: Mapping[str, Any], cwd: Path, problems: Problems) -> Node:
    try:
        return tree_of(source, "recipe", cwd)
    except ValueError as error:
        problems.add("recipe", "", str(error))
        return Node({}, "recipe", cwd)


def _locate(source: Path | str, cwd: Path) -> Path:
    path = cwd / Path(source).expanduser()
    if path.is_file():
        return Path(os.path.normpath(path))
    shipped = shipped_recipes()
    name = str(source)
    if name in shipped:
        return shipped[name]
    if path.is_dir():
        raise RecipeError(f"{source} is a directory, not a recipe", hint="name the recipe's YAML file")
    near = get_close_matches(Path(name).stem, shipped, 1, 0.6)
    hint = f"did you mean the shipped recipe {near[0]}?" if near else "see: tuner recipes list, tuner init --help"
    raise RecipeError(f"no recipe {source}", hint=hint)


def _display(path: Path, cwd: Path) -> str:
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def _read_text(path: Path, name: str, problems: Problems) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"cannot read {name}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        problems.add(f"{name}:1:1", "", f"larger than {MAX_BYTES:,} bytes: not a recipe")
        return ""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        problems.add(f"{name}:{line}:{column}", "", "not UTF-8 text")
        return ""


def _name(tree: Node, stem: str, cwd: Path) -> None:
    given = tree.child("name")
    if given is None or given.value is None:
        clean = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "run"
        tree.value["name"] = Node(clean, "default", cwd, "default")


def _output_dir(tree: Node, cwd: Path) -> None:
    node = tree.child("output_dir")
    if node is None:
        node = tree.value["output_dir"] = Node(Recipe.model_fields["output_dir"].default, "default", cwd, "default")
    name = tree.child("name")
    if isinstance(node.value, str) and name and isinstance(name.value, str) and re.fullmatch(NAME, name.value):
        node.value = node.value.replace("{name}", name.value)


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
    names = sorted(name for name in variables if name.startswith(PREFIX))
    keys = {name: name.removeprefix(PREFIX).lower().replace("__", ".") for name in names}
    return [Override(key, variables[name], name) for name, key in keys.items() if "." in key and key not in known]


def merge(tree: Node, overrides: Sequence[Override], cwd: Path, problems: Problems) -> None:
    """Write every override into the tree, in place; `null` removes what the recipe says."""
    seen: set[str] = set()
    for override in overrides:
        key = override.key.replace("-", "_")
        if key in seen:
            problems.add(override.where, "", "duplicate flag; write it once")
            continue
        seen.add(key)
        if (field := find(key)) is None:
            from tuner.config.advice import given_in

            problems.add(override.name, "", unknown(key, override.text, given_in(tree)))
        elif override.text is None:
            problems.add(override.where, "", f"needs a value; write {override.flag} VALUE")
        else:
            _merge_one(tree, key, field, override, cwd, problems)


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


def _merge_one(tree: Node, key: str, field: Field, override: Override, cwd: Path, problems: Problems) -> None:
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
    value = _read(field, override, cwd, problems)
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


def _read(field: Field, override: Override, cwd: Path, problems: Problems) -> Node | None:
    text = override.text or ""
    is_flow = text.lstrip().startswith(("[", "{"))
    is_number = field.value_type is None and type(resolve(text)) in {int, float}  # which no path is
    takes_text = field.takes_text and not is_number
    if not is_flow or (takes_text and field.value_type is not None):
        return Node(text if takes_text else resolve(text), override.where, cwd, override.where)
    inner = Problems()
    value = read_yaml(f"value: {text}", "value", cwd, inner).child("value")
    for problem in inner.found:
        problems.add(override.where, "", problem.message)
    return None if inner.found or value is None else tree_of(value.plain(), override.where, cwd)


def recipe_dict(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain JSON values that load to the same recipe, with URLs where its paths stand for them."""
    dumped: dict[str, Any] = with_urls(recipe.model_dump(mode="json"))
    evaluates = recipe.data.eval is not None or recipe.eval.tasks
    if recipe.eval.every == EvalSection().every and (not evaluates or recipe.has_open_end):
        del dumped["eval"]["every"]  # written out, it would ask for held-out rows, or for the length of the run
    for name in SECTIONS:
        if not attrgetter(name)(recipe).is_on:
            above, _, last = name.rpartition(".")
            del (dumped[above] if above else dumped)[last]
    return dumped


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one level with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return flat


def recipe_yaml(
    recipe: Recipe, origins: Mapping[str, str] | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """Return the whole recipe, defaults included, as YAML that loads to the same recipe.

    With `origins`, where each written key comes from, every line ends with that as a comment; with `notes`, by dotted
    key, those lines do that have one.
    """
    lines: list[tuple[str, str]] = []
    for key, value in recipe_dict(recipe).items():
        if isinstance(value, dict):
            lines.append((f"{key}:", ""))
            lines += [(f"  {name}: {flow(item)}", f"{key}.{name}") for name, item in value.items()]
        else:
            lines.append((f"{key}: {flow(value)}", key))
    if origins is None:
        noted = {key: f"  # {one_line(note)}" for key, note in (notes or {}).items()}
        return "".join(f"{text}{noted.get(key, '')}\n" for text, key in lines)
    width = min(60, max(len(text) for text, _ in lines))
    return "".join(f"{text.ljust(width)}  # {_origin(key, origins)}\n" if key else f"{text}\n" for text, key in lines)


def _origin(key: str, origins: Mapping[str, str]) -> str:
    places = [where for name, where in origins.items() if name == key or name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(places)) or "default"
