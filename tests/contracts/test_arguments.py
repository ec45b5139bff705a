"""Every argument has a name: no tuple of unlike things, and no `*values` that fills several named parameters.

Allowed are `tuple[X, ...]` and a pair of one type such as (start, stop); a star into a function that takes `*args`, one
over the caller's own `*args`, and `*ctx.saved_tensors`, which is how torch hands a backward function its tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.contracts.test_import_law import TREES

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """What a call can fill by position."""

    names: tuple[str, ...]
    takes_more: bool


def aliases() -> dict[str, ast.expr]:
    """Names that stand for a tuple type anywhere in the package."""
    return {
        target.id: node.value
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and is_tuple(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def is_tuple(node: ast.AST) -> bool:
    """Whether an expression is `tuple[...]`."""
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple"


def unlike(annotation: ast.expr, named: dict[str, ast.expr]) -> bool:
    """Whether a parameter with this annotation is a tuple of unlike things, perhaps among other types."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return unlike(annotation.left, named) or unlike(annotation.right, named)
    if isinstance(annotation, ast.Name):
        annotation = named.get(annotation.id, annotation)
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        return unlike(annotation.slice.elts[0], named)
    if not (is_tuple(annotation) and isinstance(annotation, ast.Subscript)):
        return False
    items = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    return len({ast.unparse(item) for item in items} - {"..."}) > 1


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def tuple_parameters(tree: ast.AST, named: dict[str, ast.expr]) -> Iterator[str]:
    """Parameters that are tuples of unlike things."""
    for function in functions(tree):
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None and unlike(argument.annotation, named):
                yield f"line {argument.lineno}: {function.name}({argument.arg}: {ast.unparse(argument.annotation)})"


def signature(function: Function, is_method: bool) -> Signature:
    """What a call of a function may fill by position; of a method, without the object itself."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    return Signature(tuple(names[1:] if is_method and not static else names), function.args.vararg is not None)


def of_class(node: ast.ClassDef) -> Signature:
    """What a call of a class may fill by position: its `__init__`, else its annotated fields."""
    for item in node.body:
        if isinstance(item, Function) and item.name == "__init__":
            return signature(item, is_method=True)
    return Signature(tuple(ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)), False)


def callables() -> tuple[dict[tuple[str, str], Signature], dict[str, list[Signature]]]:
    """Functions and classes by module and name, and methods by name."""
    plain: dict[tuple[str, str], Signature] = {}
    methods: dict[str, list[Signature]] = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                plain[module, node.name] = of_class(node)
                for item in node.body:
                    if isinstance(item, Function):
                        methods.setdefault(item.name, []).append(signature(item, is_method=True))
        plain |= {(module, node.name): signature(node, False) for node in tree.body if isinstance(node, Function)}
    return plain, methods


PLAIN, METHODS = callables()
NAMED = aliases()


def called(module: str, tree: ast.AST, call: ast.Call) -> list[Signature]:
    """The functions of ours that a call may mean."""
    if isinstance(call.func, ast.Attribute):
        return METHODS.get(call.func.attr, [])
    if not isinstance(call.func, ast.Name):
        return []
    name = call.func.id
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return [PLAIN[node.module, alias.name]] if (node.module, alias.name) in PLAIN else []
    return [PLAIN[module, name]] if (module, name) in PLAIN else []


def splats(module: str, tree: ast.AST) -> Iterator[str]:
    """Calls of functions of ours in which one `*values` fills several named parameters."""
    passed_on = {f"*{function.args.vararg.arg}" for function in functions(tree) if function.args.vararg is not None}
    passed_on.add("*ctx.saved_tensors")
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        place = next((i for i, item in enumerate(call.args) if isinstance(item, ast.Starred)), None)
        if place is None or ast.unparse(call.args[place]) in passed_on:
            continue
        known = called(module, tree, call)
        by_name = {keyword.arg for keyword in call.keywords}
        after = len(call.args) - place - 1
        filled = [len([name for name in item.names[place:] if name not in by_name]) - after for item in known]
        if known and not any(item.takes_more for item in known) and min(filled) > 1:
            yield f"line {call.lineno}: {ast.unparse(call)[:90]}"


def problems(module: str, tree: ast.AST) -> list[str]:
    """What in a module hands over arguments without their names."""
    return [*tuple_parameters(tree, NAMED), *splats(module, tree)]


@pytest.mark.parametrize("module", sorted(TREES))
def test_arguments_have_names(module: str) -> None:
    found = problems(module, TREES[module])
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "def f(around: tuple[Console, bool]) -> None: ...",
        "def f(*, around: tuple[Console, bool] | None = None) -> None: ...",
        "def f(around: Annotated[tuple[int, str], 1]) -> None: ...",
        "class A:\n    def f(self, pair: tuple[int, float]) -> None: ...",
        "def f(a, b): ...\ndef g(x): f(*x)",
        "def f(a, b, c): ...\ndef g(x): f(1, *x)",
        "class A:\n    a: int\n    b: str\ndef g(x): A(*x)",
    ],
)
def test_the_reader_finds(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(code, monkeypatch)


@pytest.mark.parametrize(
    "code",
    [
        "def f(bounds: tuple[int, int], names: tuple[str, ...], rows: list[tuple[int, str]]) -> tuple[int, str]: ...",
        "def f(a, *more): ...\ndef g(x): f(*x)",
        "def f(a, b): ...\ndef g(x): f(1, *x)",
        "def g(x): print(*x)",
        "def f(a, b): ...\ndef g(*x): f(*x)",
        "def f(a, b): ...\ndef g(ctx): f(*ctx.saved_tensors)",
    ],
)
def test_the_reader_allows(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not checked(code, monkeypatch)


def checked(code: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is found in a module of this text."""
    monkeypatch.setitem(TREES, "tuner.somewhere", ast.parse(code))
    plain, methods = callables()
    monkeypatch.setitem(globals(), "PLAIN", plain)
    monkeypatch.setitem(globals(), "METHODS", methods)
    return problems("tuner.somewhere", TREES["tuner.somewhere"])
