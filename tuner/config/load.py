"""Loading a recipe: read, merge the flags, resolve paths, check; nothing is created, opened or initialised."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.config.check import check
from tuner.config.dump import recipe_yaml
from tuner.config.overrides import Override, merge
from tuner.config.paths import recipes_dir, resolve_paths
from tuner.config.recipe import NAME, Recipe
from tuner.config.shipped import shipped_recipes, ships
from tuner.config.yaml import MAX_BYTES, Node, Problems, dotted, read_yaml, tree_of
from tuner.errors import Problem, RecipeError

__all__ = ["LoadedRecipe", "Override", "ReadRecipe", "RecipeText", "Source", "load_recipe", "read_recipe"]


MARKS = 3
"""Keys that only one other tool has, from which on a file is taken for its configuration."""


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
        if path.parent == recipes_dir():
            _start_from(tree, path.parent, cwd)
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
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        problems.add(f"{name}:{line}:{column}", "", "not UTF-8 text")
        return ""


def _start_from(tree: Node, recipes: Path, cwd: Path) -> None:
    """Let a shipped recipe's paths start from the working directory, unless the file ships with it."""
    for _, node in tree.leaves():
        if not ships(recipes, node):
            node.base = cwd


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
