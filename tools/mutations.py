"""Planted faults: where in `tuner/` one is by name, and what it changes as a pattern of Python (or tokens of C).

A place is the end of a qualified name: module, class and function (`runtime.files.publish_dir`), or a module. A
function that moved is found by what is left of its name, if only one has it. A pattern is an expression or statements
of Python, compared as syntax: layout and comments do not count. In it a name of one capital letter stands for any
expression, the same wherever it stands, so that locals may be renamed; `...` among arguments stands for those that are
not given. It must be found exactly once in its place; what replaces it may use its letters, and where nothing does the
statements go.
"""

import ast
import builtins
import copy
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "tuner"
IGNORED_FIELDS = frozenset({"ctx", "type_comment", "kind", "type_params"})
IMPORTS = (ast.Import, ast.ImportFrom)
DEFINED = re.compile(r"(?:def|class) (\w+)[(:]")
TOKEN = re.compile(r"\w+(?:\.\w+)?|\S")
Letters = dict[str, ast.AST]


class NoPlaceError(ValueError):
    """A fault cannot be planted in a tree: the message says why."""


@dataclass(frozen=True)
class Mutant:
    """One fault: at `place`, `find` becomes `put`; `tests` are what should then fail."""

    name: str
    place: str
    find: str
    put: str
    tests: tuple[str, ...]

    def problem(self, root: Path) -> str:
        """Why the fault does not apply to the tree at `root`; empty when it does."""
        try:
            self.planted(root)
        except (NoPlaceError, SyntaxError) as error:
            return str(error)
        missing = [test for test in self.tests if not (root / test).exists()]
        return f"no tests at {missing[0]}" if missing else ""

    def apply(self, root: Path) -> None:
        """Plant the fault in the tree at `root`."""
        file, text = self.planted(root)
        file.write_text(text, encoding="utf-8")

    def planted(self, root: Path) -> tuple[Path, str]:
        """The file that holds the fault, and its text with it. Raises NoPlaceError."""
        file, qualified = find_place(self.place, root)
        text = texts(root)[file]
        tree = ast.parse(text)
        _require_known(tree, self.find, self.put)
        statement = tree if not qualified else named(tree, qualified.partition(".")[0])
        place = statement if "." not in qualified else named(statement, qualified.partition(".")[2])
        changed = replace(place, self.find, self.put)
        if changed != 1:
            raise NoPlaceError(f"its pattern occurs {changed} times in {qualified or file.stem}")
        return file, _with(text, statement)


@dataclass(frozen=True)
class InC(Mutant):
    """One fault in a function of the kernels in C: `place` is its name, `find` is compared as tokens."""

    def planted(self, root: Path) -> tuple[Path, str]:
        """As of a fault in Python."""
        function = rf"^\w[^;\n]*\b{re.escape(self.place)}\([^;]*?\) \{{\n.*?^\}}"
        start = re.compile(function, flags=re.MULTILINE | re.DOTALL)
        texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / PACKAGE).rglob("*.[ch]"))}
        found = [(path, match) for path, text in texts.items() for match in start.finditer(text)]
        if len(found) != 1:
            raise NoPlaceError(f"{len(found)} functions in C are named {self.place}")
        [(path, match)] = found
        tokens = r"\s*".join(re.escape(token) for token in TOKEN.findall(self.find))
        body, count = re.subn(tokens, lambda _: self.put, match[0])
        if count != 1:
            raise NoPlaceError(f"its pattern occurs {count} times in {self.place}")
        return path, texts[path].replace(match[0], body)


def read_mutants(table: Path) -> tuple[Mutant, ...]:
    """The faults of a table. Raises TypeError for one with another key than these."""
    rows: list[dict[str, Any]] = yaml.safe_load(table.read_text(encoding="utf-8"))
    return tuple((InC if row.pop("c", False) else Mutant)(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def _with(text: str, changed: ast.AST) -> str:
    """A file's text with one of its statements, or all of it, as a tree has it now; the others keep their layout."""
    if not isinstance(changed, ast.FunctionDef | ast.ClassDef):
        return ast.unparse(changed) + "\n"
    lines = text.splitlines(keepends=True)
    first = min([changed.lineno, *(decorator.lineno for decorator in changed.decorator_list)])
    return "".join([*lines[: first - 1], ast.unparse(changed), "\n", *lines[changed.end_lineno :]])


@functools.cache
def texts(root: Path) -> dict[Path, str]:
    """Every Python file of the package."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((root / PACKAGE).rglob("*.py"))}


@functools.cache
def parsed(path: Path, root: Path) -> ast.Module:
    """What a file says, to be looked at and not to be changed."""
    return ast.parse(texts(root)[path])


@functools.cache
def _by_name(root: Path) -> dict[str, set[Path]]:
    """The files that may define a name: by a function or a class, by their own name or their directory's."""
    found: dict[str, set[Path]] = {}
    for path, text in texts(root).items():
        for name in {path.stem, path.parent.name, *DEFINED.findall(text)}:
            found.setdefault(name, set()).add(path)
    return found


@functools.cache
def places_in(path: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """A file's module, classes and functions by their whole names: the file, and the name within it."""
    module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    names = ["", *_names(parsed(path, root))]
    return {f"{module}.{name}".removesuffix("."): (path, name) for name in names}


def places(root: Path, last: str = "") -> dict[str, tuple[Path, str]]:
    """The places of all files, or of those that may have one whose name ends so: parsing all takes seconds."""
    chosen = sorted(_by_name(root).get(last, ())) if last else texts(root)
    return {name: place for path in chosen for name, place in places_in(path, root).items()}


def _names(node: ast.AST, before: str = "") -> Iterator[str]:
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield before + child.name
                yield from _names(child, f"{before}{child.name}.")
            elif not isinstance(child, ast.Expr | ast.Assign | ast.Return):
                yield from _names(child, before)


def find_place(place: str, root: Path) -> tuple[Path, str]:
    """The file of a place and the name within it. Raises NoPlaceError with the names that come near."""
    words = place.split(".")
    known = places(root, words[-1])
    for skipped in range(len(words)):
        end = ".".join(words[skipped:])
        found = [name for name in known if name == end or name.endswith(f".{end}")]
        if len(found) == 1:
            return known[found[0]]
        if found:
            raise NoPlaceError(f"{place} may be any of {', '.join(found)}")
    near = difflib.get_close_matches(f"{PACKAGE}.{place}", places(root), n=3, cutoff=0.6)
    raise NoPlaceError(f"nothing is named {place}" + (f"; near it: {', '.join(near)}" if near else ""))


def named(tree: ast.Module, qualified: str) -> ast.AST:
    """The module, class or function of a name within a file."""
    node: ast.AST = tree
    for word in filter(None, qualified.split(".")):
        node = next(
            child
            for child in ast.walk(node)
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.name == word and child is not node
        )
    return node


def replace(place: ast.AST, find: str, put: str) -> int:
    """Put one pattern in place of another wherever it is found below a node; how often that was."""
    pattern, wanted = ast.parse(find).body, ast.parse(put).body
    match pattern, wanted:
        case [ast.Expr(value=old)], [ast.Expr(value=new)]:
            change = _Expressions(old, new)
            change.generic_visit(place)
            return change.count
    return sum(
        _replace_run(body, pattern, wanted)
        for node in ast.walk(place)
        for name in ("body", "orelse", "finalbody")
        if isinstance(body := getattr(node, name, None), list)
    )


def _require_known(tree: ast.Module, find: str, put: str) -> None:
    """A fault that stops the interpreter at once shows nothing: what it names must be there."""
    wanted = ast.parse(put)
    unknown = _names_in(wanted) - _names_in(wanted, ast.Store) - _names_in(ast.parse(find)) - set(dir(builtins))
    if unknown:  # in few faults, and looking through a whole file takes long
        imported = {n.asname or n.name for node in ast.walk(tree) if isinstance(node, IMPORTS) for n in node.names}
        unknown -= _names_in(tree) | imported
    if unknown:
        raise NoPlaceError(f"{', '.join(sorted(unknown))}: not known there")


def _names_in(tree: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    nodes = [*ast.walk(tree)]
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    return found | {node.arg for node in nodes if isinstance(node, ast.arg)}


@dataclass
class _Expressions(ast.NodeTransformer):
    """Replaces an expression."""

    pattern: ast.expr
    put: ast.expr
    count: int = field(default=0)

    def visit(self, node: ast.AST) -> Any:
        letters: Letters = {}
        if isinstance(node, ast.expr) and matches(self.pattern, node, letters):
            self.count += 1
            return _Filled(letters).visit(copy.deepcopy(self.put))
        return self.generic_visit(node)


class _Filled(ast.NodeTransformer):
    """Puts what the letters stand for in their place."""

    def __init__(self, letters: Letters) -> None:
        self.letters = letters

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.letters.get(node.id, node))


def _replace_run(body: list[Any], pattern: Sequence[ast.stmt], put: Sequence[ast.stmt]) -> int:
    """Replace statements that follow each other in one block."""
    count = 0
    for at in range(len(body) - len(pattern), -1, -1):
        letters: Letters = {}
        if all(matches(p, node, letters) for p, node in zip(pattern, body[at:], strict=False)):
            filled = [_Filled(letters).visit(copy.deepcopy(statement)) for statement in put]
            body[at : at + len(pattern)] = filled or ([] if len(body) > len(pattern) else [ast.Pass()])
            count += 1
    return count


def matches(pattern: Any, node: Any, letters: Letters) -> bool:
    """Whether a piece of syntax fits a pattern; `letters` takes what the capital letters stand for."""
    if isinstance(pattern, ast.Name) and len(pattern.id) == 1 and pattern.id.isupper():
        known = letters.setdefault(pattern.id, node)
        return isinstance(node, ast.expr) and matches(known, node, {})
    if isinstance(pattern, ast.arg) and isinstance(node, ast.arg) and len(pattern.arg) == 1 and pattern.arg.isupper():
        return matches(letters.setdefault(pattern.arg, ast.Name(node.arg)), ast.Name(node.arg), {})
    if isinstance(pattern, list):
        return isinstance(node, list) and _lists_match(pattern, node, letters)
    if type(pattern) is not type(node):
        return False
    if not isinstance(pattern, ast.AST):
        return bool(pattern == node)
    fields = [name for name in pattern._fields if name not in IGNORED_FIELDS]
    if isinstance(pattern, ast.Call) and any(map(_is_rest, pattern.args)):
        given = {word.arg: word.value for word in node.keywords}
        asked = all(word.arg in given and matches(word.value, given[word.arg], letters) for word in pattern.keywords)
        return asked and all(matches(getattr(pattern, n), getattr(node, n), letters) for n in ("func", "args"))
    return all(matches(getattr(pattern, name), getattr(node, name), letters) for name in fields)


def _lists_match(pattern: list[Any], node: list[Any], letters: Letters) -> bool:
    if pattern and _is_rest(pattern[-1]):
        head = pattern[:-1]
        return len(node) >= len(head) and _lists_match(head, node[: len(head)], letters)
    return len(pattern) == len(node) and all(matches(p, n, letters) for p, n in zip(pattern, node, strict=True))


def _is_rest(node: Any) -> bool:
    inner = node.value if isinstance(node, ast.Expr) else node
    return isinstance(inner, ast.Constant) and inner.value is ...
