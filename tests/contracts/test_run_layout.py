"""The names in a run directory are written in `tuner/rundir/layout.py` and nowhere else: read from every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.syntax import nodes, trees
from tests.fixtures.tables import cases
from tuner.rundir import layout

LAYOUT = "tuner.rundir.layout"
NAMES = {value for key, value in vars(layout).items() if key.isupper() and isinstance(value, str)}
# Names that mean nothing else, wherever they stand.
UNMISTAKABLE = {name for name in NAMES if "." in name} - {layout.RECIPE} | {layout.MODEL_PREFIX, layout.STOP}
UNMISTAKABLE |= {layout.DAMAGED_CHECKPOINTS}
# Directories of other kinds that have a file or directory of the same name.
OTHERS = {
    ("tuner.data.prepared", layout.SAMPLES): "of prepared data",
    ("tuner.data.building.rows", layout.SAMPLES): "of prepared data",
    ("tuner.data.id_probes", layout.ID_PROBES): "of prepared data",
    ("tuner.generate", layout.EXPORTS): "of this machine's cache",
    ("tuner.cli.command", layout.RECIPE): "of the user, in the working directory",
}


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of constants that stand as statements of their own."""
    return {id(node.value) for node in nodes(tree, ast.Expr)}


def paths(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions used as the name of a file: joined with `/`, handed to a path's function, or kept as a constant."""
    for joined in nodes(tree, ast.BinOp):
        if isinstance(joined.op, ast.Div):
            yield from (joined.left, joined.right)
    for call in nodes(tree, ast.Call):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in {"Path", "joinpath", "glob", "rglob", "with_name", "join"}:
            yield from call.args
    for node in nodes(tree, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any(name.isupper() for name in names):
            yield node.value


def written(module: str, tree: ast.AST) -> list[str]:
    """The names of a run directory that a module writes as literals, each with its line."""
    told = docstrings(tree)
    as_paths = {id(node) for node in paths(tree)}
    found = []
    for node in nodes(tree, ast.Constant):
        if not isinstance(node.value, str) or id(node) in told:
            continue
        first = node.value.split("/")[0]
        name = node.value if node.value in UNMISTAKABLE else first if id(node) in as_paths and first in NAMES else None
        if name is not None and (module, name) not in OTHERS:
            found.append(f"{module}:{node.lineno} writes {node.value!r}: import it from {LAYOUT}")
    return found


def test_modules_write_no_name_of_a_run_directory() -> None:
    others = {module: tree for module, tree in trees().items() if module != LAYOUT}
    assert len(others) == len(trees()) - 1
    assert [found for module, tree in others.items() for found in written(module, tree)] == []


def test_every_exception_is_still_there() -> None:
    for module, name in OTHERS:
        constants = {node.value for node in nodes(trees()[module], ast.Constant)}
        assert name in constants, f"{module} no longer writes {name}"


@pytest.mark.parametrize("code", cases(__file__, "the_reader_finds_names"))
def test_the_reader_finds_names(code: str) -> None:
    assert written("tuner.somewhere", ast.parse(code))


@pytest.mark.parametrize("code", ["'''run.json'''", "facts['launches']", "print('profile')", "x = Path('recipes')"])
def test_the_reader_leaves_other_words(code: str) -> None:
    assert not written("tuner.somewhere", ast.parse(code))


def test_the_layout_is_described_in_its_own_words() -> None:
    described = layout.__doc__ or ""
    others = {layout.MODEL_PREFIX, layout.EMA_PREFIX, layout.DAMAGED_CHECKPOINTS}
    assert [name for name in NAMES - others if name not in described] == []
    assert Path(LAYOUT.replace(".", "/") + ".py").is_file()
