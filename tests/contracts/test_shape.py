"""Training stays readable: short functions, small classes, a loop on one screen that knows no method."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for part in ("train", "setup", "run") for path in (ROOT / "tuner" / part).rglob("*.py"))
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 250
SCREEN_LINES = 45


def defined(tree: ast.AST, kinds: tuple[type[ast.AST], ...]) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every definition of the given kinds."""
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            yield node.name, node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_functions_and_classes_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = dict(defined(tree, (ast.FunctionDef, ast.AsyncFunctionDef)))
    classes = dict(defined(tree, (ast.ClassDef,)))
    assert not {name: n for name, n in functions.items() if n > MAX_FUNCTION_LINES}
    assert not {name: n for name, n in classes.items() if n > MAX_CLASS_LINES}


def test_the_loop_is_one_screen_without_method_or_rank() -> None:
    tree = ast.parse((ROOT / "tuner" / "train" / "loop.py").read_text(encoding="utf-8"))
    loop = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train_loop")
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= SCREEN_LINES
    asked = [name for node in ast.walk(loop) if isinstance(node, ast.If) for name in ast.walk(node.test)]
    names = {node.attr for node in asked if isinstance(node, ast.Attribute)}
    names |= {node.id for node in asked if isinstance(node, ast.Name)}
    assert not names & {"method", "kind", "rank", "is_main", "world_size"}
