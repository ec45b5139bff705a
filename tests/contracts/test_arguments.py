"""Every argument has a name: no tuple of unlike things, and no `*values` that fills several named parameters.

Allowed are `tuple[X, ...]` and a pair of one type such as (start, stop); a star into a function that takes `*args`, one
over the caller's own `*args`, and `*ctx.saved_tensors`, which is how torch hands a backward function its tensors.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from tests.contracts.syntax import nodes, trees
from tests.fixtures.tables import cases

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """What a call can fill by position."""

    names: tuple[str, ...]
    takes_more: bool


@dataclass(frozen=True)
class Known:
    """What calls and annotations in some modules may mean."""

    plain: dict[tuple[str, str], Signature]
    """Functions and classes by module and name."""
    methods: dict[str, list[Signature]]
    named: dict[str, ast.expr]
    """Names that stand for a tuple type."""


def aliases(modules: Mapping[str, ast.Module]) -> dict[str, ast.expr]:
    """Names that stand for a tuple type anywhere in some modules."""
    return {
        target.id: node.value
        for tree in modules.values()
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


def functions(tree: ast.AST) -> list[Function]:
    """Every function and method of a module."""
    return [*nodes(tree, ast.FunctionDef), *nodes(tree, ast.AsyncFunctionDef)]


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


def known_in(modules: Mapping[str, ast.Module]) -> Known:
    """What some modules define."""
    plain: dict[tuple[str, str], Signature] = {}
    methods: dict[str, list[Signature]] = {}
    for module, tree in modules.items():
        for node in nodes(tree, ast.ClassDef):
            plain[module, node.name] = of_class(node)
            for item in node.body:
                if isinstance(item, Function):
                    methods.setdefault(item.name, []).append(signature(item, is_method=True))
        plain |= {(module, node.name): signature(node, False) for node in tree.body if isinstance(node, Function)}
    return Known(plain, methods, aliases(modules))


@functools.cache
def of_package() -> Known:
    """What the package defines."""
    return known_in(trees())


def called(module: str, tree: ast.AST, call: ast.Call, known: Known) -> list[Signature]:
    """The functions of ours that a call may mean."""
    if isinstance(call.func, ast.Attribute):
        return known.methods.get(call.func.attr, [])
    if not isinstance(call.func, ast.Name):
        return []
    name = call.func.id
    for node in nodes(tree, ast.ImportFrom):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                found = known.plain.get((node.module or "", alias.name))
                return [found] if found else []
    return [known.plain[module, name]] if (module, name) in known.plain else []


def splats(module: str, tree: ast.AST, known: Known) -> Iterator[str]:
    """Calls of functions of ours in which one `*values` fills several named parameters."""
    passed_on = {f"*{function.args.vararg.arg}" for function in functions(tree) if function.args.vararg is not None}
    passed_on.add("*ctx.saved_tensors")
    for call in nodes(tree, ast.Call):
        place = next((i for i, item in enumerate(call.args) if isinstance(item, ast.Starred)), None)
        if place is None or ast.unparse(call.args[place]) in passed_on:
            continue
        meant = called(module, tree, call, known)
        by_name = {keyword.arg for keyword in call.keywords}
        after = len(call.args) - place - 1
        filled = [len([name for name in item.names[place:] if name not in by_name]) - after for item in meant]
        if meant and not any(item.takes_more for item in meant) and min(filled) > 1:
            yield f"line {call.lineno}: {ast.unparse(call)[:90]}"


def problems(module: str, tree: ast.AST, known: Known) -> list[str]:
    """What in a module hands over arguments without their names."""
    return [*tuple_parameters(tree, known.named), *splats(module, tree, known)]


def test_arguments_have_names() -> None:
    found = {module: problems(module, tree, of_package()) for module, tree in trees().items()}
    assert {module: named for module, named in found.items() if named} == {}
    assert len(of_package().methods) > 500


@pytest.mark.parametrize("code", cases(__file__, "the_reader_finds"))
def test_the_reader_finds(code: str) -> None:
    assert checked(code)


@pytest.mark.parametrize("code", cases(__file__, "the_reader_allows"))
def test_the_reader_allows(code: str) -> None:
    assert not checked(code)


def checked(code: str) -> list[str]:
    """What is found in a module of this text."""
    tree = ast.parse(code)
    return problems("somewhere", tree, known_in({"somewhere": tree}))
