"""docs/code.md and docs/code-places.md say how the code is laid out: what they name is there, no import goes up."""

import ast
import functools
import re
from pathlib import Path

from tests.contracts.syntax import PACKAGE, ROOT, modules, trees
from tests.contracts.test_import_law import imported_modules, part

PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("code.md", "code-places.md"))
FLOORS = {
    name: int(number)
    for number, names in re.findall(r"^ +floor (\d+)((?: +\w+)+)$", PAGE, flags=re.MULTILINE)
    for name in names.split()
}
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)+[a-z_]*(?:\.py)?(?::\w+)?|[a-z_]+\.py:\w+)`", PAGE)))
PARTS = {part(name) for name in modules()} - {"", "__main__"}


@functools.cache
def defined(path: Path) -> set[str]:
    """Functions, classes and constants at the top level of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def problem(name: str) -> str | None:
    """What is wrong with a file, directory or `file.py:name` of the page; None where it is there."""
    place, _, item = name.partition(":")
    path = next((base / place for base in (PACKAGE, ROOT, PACKAGE / "data") if (base / place).exists()), None)
    if path is None:
        return f"{place} is not there"
    if item and item not in defined(path):
        return f"{place} defines no {item}"
    return None


def test_what_the_page_names_is_there() -> None:
    assert [found for name in NAMED if (found := problem(name)) is not None] == []


def test_every_package_is_on_the_page_with_its_floor_and_its_sentence() -> None:
    described = set(re.findall(r"^\| `(\w+)` \| ", PAGE, flags=re.MULTILINE))
    assert described == set(FLOORS) == PARTS
    assert len(set(FLOORS.values())) <= 10


def test_no_import_goes_up() -> None:
    up = {}
    for module, tree in trees().items():
        if (own := part(module)) in FLOORS:
            lower = {part(name) for name in imported_modules(tree, trees())} - {own, ""}
            up[module] = [name for name in lower if FLOORS[name] >= FLOORS[own]]
    assert len(up) > 400
    assert {module: names for module, names in up.items() if names} == {}


def test_every_task_is_in_the_table() -> None:
    files = {path.name for path in (PACKAGE / "run" / "tasks").glob("*.py")}
    told = {name.rpartition("/")[2] for name in NAMED if name.startswith("run/tasks/") and name.endswith(".py")}
    assert files - {"__init__.py", "launch_tasks.py", "export_process.py"} <= told


def test_what_is_not_there_is_seen() -> None:
    assert problem("train/nothing.py") == "train/nothing.py is not there"
    assert problem("train/loop.py:nothing") == "train/loop.py defines no nothing"
    assert problem("train/loop.py:train_loop") is None
    assert len(NAMED) > 40
