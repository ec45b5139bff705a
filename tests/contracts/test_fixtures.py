"""What tests share is in `tests/fixtures` or a helper beside them: never a tool, outside the tests of tools."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def imported(path: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_tools_are_no_fixtures() -> None:
    modules = [path for path in TESTS.rglob("test_*.py") if TESTS / "tools" not in path.parents]
    assert len(modules) > 100
    assert not [path for path in modules if any(name.split(".")[0] == "tools" for name in imported(path))]


def test_whole_launches_come_from_the_fixtures() -> None:
    assert not [path for path in TESTS.rglob("*.py") if "tests.run.test_run" in imported(path)]
