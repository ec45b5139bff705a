"""What tests share is in `tests/fixtures` or a helper beside them: never a tool, outside the tests of tools."""

import ast
from collections.abc import Iterable
from pathlib import Path

from tests.contracts.syntax import nodes

TESTS = Path(__file__).resolve().parents[1]


def imported(text: str) -> set[str]:
    """The modules that a text imports."""
    tree = ast.parse(text)
    plain = {alias.name for node in nodes(tree, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes(tree, ast.ImportFrom) if node.module}


def importing(name: str, paths: Iterable[Path]) -> list[Path]:
    """The files that import a module or one in it; read as Python is what has its name in it."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    named = {path: imported(text) for path, text in texts.items() if name in text}
    return [path for path, found in named.items() if any(f"{module}.".startswith(f"{name}.") for module in found)]


def test_tools_are_no_fixtures() -> None:
    modules = [path for path in TESTS.rglob("test_*.py") if TESTS / "tools" not in path.parents]
    assert len(modules) > 100
    assert importing("tools", modules) == []
    assert importing("tools", (TESTS / "tools").glob("test_m*.py"))


def test_whole_launches_come_from_the_fixtures() -> None:
    assert importing("tests.run.test_run", TESTS.rglob("*.py")) == []
