"""No line of the tree may run what came from a file, ask a shell, or trust remote code; the allow-list is empty.

"No pickle" means that nothing is unpickled that another program, another user or a file may have written. Processes
that one command has started itself send each other pickled values, over sockets and process groups that only they
hold; the files in which that happens are named here, and nothing else may.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.syntax import ROOT, modules, trees, walk
from tests.fixtures.tables import cases

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BETWEEN_OWN_PROCESSES: Any = cases(__file__, "between_own_processes")
"""Who unpickles what another process of the same command has sent."""
RECEIVERS = set(cases(__file__, "receivers"))
CALLS: Any = cases(__file__, "calls")
SHARED = ("/tmp/", "/dev/shm/")
KEYWORDS: Any = cases(__file__, "keywords")


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def dangers(every: Iterable[ast.AST]) -> Iterator[str]:
    """Everything among the nodes of a tree that the security floor forbids."""
    for node in every:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                if name.split(".")[0] in UNPICKLERS:
                    yield f"line {node.lineno}: imports {name}"
            imported = {f"{module}.{alias.name}" for alias in node.names} if module else set()
            yield from (f"line {node.lineno}: imports {name}" for name in sorted(imported & set(CALLS)))
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS:
                yield f"line {node.lineno}: {CALLS[name]}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in KEYWORDS and value is KEYWORDS[keyword.arg]:
                    yield f"line {node.lineno}: {keyword.arg}={value}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(SHARED):
            yield f"line {node.lineno}: a fixed name in a shared directory"


def receivers(every: Iterable[ast.AST]) -> Iterator[str]:
    """What among nodes unpickles things that another process sends: multiprocessing, torch's object collectives."""
    for node in every:
        names: set[str] = set()
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0], *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names = {node.attr}
        yield from (f"line {node.lineno}: {name}" for name in sorted(names & {*RECEIVERS, "multiprocessing"}))


STANDS_FOR_PYTHON_C = ("tests/fixtures/forked.py", "exec")
"""The one exception: a fixture of the tests that runs what `python -c` would."""


def sources(folder: str) -> list[Path]:
    """Every Python file that this project wrote, except this one, whose controls name what it forbids."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__).resolve()]


@pytest.mark.parametrize("folder", ["tuner", "tools", "tests"])
def test_sources_stay_above_the_floor(folder: str) -> None:
    found, receiving = {}, set()
    parsed = {path: trees()[name] for name, path in modules().items()} if folder == "tuner" else {}
    for path in sources(folder):
        every = walk(parsed.get(path) or ast.parse(path.read_text(encoding="utf-8")))
        name = path.relative_to(ROOT).as_posix()
        found[name] = [danger for danger in dangers(every) if (name, danger.split(": ")[1]) != STANDS_FOR_PYTHON_C]
        if folder != "tests" and any(receivers(every)):
            receiving.add(name)
    assert len(found) > 100
    assert {name: dangerous for name, dangerous in found.items() if dangerous} == {}
    assert receiving == {name for name in BETWEEN_OWN_PROCESSES if name.startswith(f"{folder}/")}


@pytest.mark.parametrize("line", cases(__file__, "the_floor_catches"))
def test_the_floor_catches(line: str) -> None:
    assert list(dangers(walk(ast.parse(line))))


@pytest.mark.parametrize("line", cases(__file__, "what_unpickles_between_processes_is_found"))
def test_what_unpickles_between_processes_is_found(line: str) -> None:
    assert list(receivers(walk(ast.parse(line))))


@pytest.mark.parametrize("line", cases(__file__, "the_floor_lets_pass"))
def test_the_floor_lets_pass(line: str) -> None:
    assert not list(dangers(walk(ast.parse(line))))
