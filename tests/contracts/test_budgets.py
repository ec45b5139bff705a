"""What grows when nobody looks: lines of code, lazy imports, patched layers, recipes read below their resolution.

Each number is today's: it falls with the code, and rises only where a change weighs what it adds and says so here.
"""

import ast
import re
from pathlib import Path

from tests.contracts.syntax import ROOT, modules, nodes, trees

LINES = {"tuner": 57_665, "tests": 52_741, "tools": 17_603}
"""Of code: without docstrings, comments and blank lines."""
SPINE = ("train/loop", "train/step", "parallel/assemble", "run/main", "run/preflight", "setup/build", "model/root")
SPINE_LINES = 1_695
"""Of these and of checkpoint/, which are what every training is: read top to bottom in an hour (docs/code.md)."""
LAZY_IMPORTS = 276


def code_lines(text: str) -> int:
    """Lines that hold a token of code; a string that is a statement is none, and all of any other is code."""
    docstrings: set[int] = set()
    inside: set[int] = set()
    found: list[ast.AST] = [ast.parse(text)]
    for node in found:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.JoinedStr | ast.Constant) and node.end_lineno != node.lineno:
            inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if getattr(node, "end_lineno", None) != getattr(node, "lineno", 0):  # no string of lines is below one line
            found += ast.iter_child_nodes(node)
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    written = {number for number, line in lines if line and not line.startswith("#")}
    return len((written | inside) - docstrings)


def files(directory: str) -> list[Path]:
    return sorted((ROOT / directory).rglob("*.py"))


def test_lines_of_code() -> None:
    assert code_lines('"""A docstring."""\n\n# a comment\nx = (\n    1\n)\n') == 3
    found = {name: sum(code_lines(path.read_text(encoding="utf-8")) for path in files(name)) for name in LINES}
    assert {name: count for name, count in found.items() if count > LINES[name]} == {}


def test_lines_of_the_spine() -> None:
    paths = [ROOT / "tuner" / f"{name}.py" for name in SPINE] + files("tuner/checkpoint")
    assert sum(code_lines(path.read_text(encoding="utf-8")) for path in paths) <= SPINE_LINES


def test_imports_inside_functions() -> None:
    inside = {
        node
        for tree in trees().values()
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for function in nodes(tree, kind)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(inside) <= LAZY_IMPORTS


def test_layers_whose_forward_is_replaced() -> None:
    assigned = re.compile(r"\.forward\s*=[^=]|\[\"forward\"\]\s*=[^=]|setattr\([^)]*\"forward\"")
    patched = [name for name, path in modules().items() if assigned.search(path.read_text("utf-8"))]
    assert patched == ["tuner.model.wrap"], "who may go around whom is checked there"


def test_what_is_made_of_a_model_has_one_door() -> None:
    """Nothing of the root is written after construction; what is made of the model is in its parts, by one method."""
    root = next(node for node in nodes(trees()["tuner.model.root"], ast.ClassDef) if node.name == "CausalLM")
    methods = [node for node in root.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    assert [what for method in methods for what, owner in _written(method) if owner == "self"] == []
    others = {
        (name, what)
        for name, tree in trees().items()
        for what, owner in _written(tree)
        if owner.rpartition(".")[2] in {"root", "parts"} and owner != "path.parts"
    }
    assert others == {("tuner.profile.tracing", "each.parts.max_forwards")}, "which stands in for the other processes"


def _written(tree: ast.AST) -> list[tuple[str, str]]:
    """Attributes that are assigned to, deleted or set by name, and whose they are."""
    found = [node for node in nodes(tree, ast.Attribute) if not isinstance(node.ctx, ast.Load)]
    named = [call for call in nodes(tree, ast.Call) if ast.unparse(call.func) in {"setattr", "delattr"}]
    return [(ast.unparse(node), ast.unparse(node.value)) for node in found] + [
        (ast.unparse(call), ast.unparse(call.args[0])) for call in named
    ]


def test_below_where_a_recipe_is_resolved_nobody_reads_it() -> None:
    """A function takes the sections that it goes by, so that its signature says what it depends on.

    Preflight makes the plan by the recipe. The whole of it goes from one function to what resolves it again: a later
    launch, the prediction of another run, the process that prepares a window.
    """
    reads = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in trees().items()
        if not name.startswith(("tuner.config", "tuner.setup", "tuner.run.preflight"))
        for node in nodes(tree, ast.Attribute)
        if node.attr == "recipe" and re.search(r"resolved(\(.*\))?$", ast.unparse(node.value))
    ]
    assert reads == []
    text = {name: path.read_text("utf-8") for name, path in modules().items()}
    setup = "\n".join(of for name, of in text.items() if name.startswith("tuner.setup"))
    found = re.findall(r"def (\w+)\((?:self|[^)]*(?:Resolved|Assembly)[^)]*)\) -> Recipe\b", setup)
    fields = re.findall(r"^    (\w+): Recipe$", setup, re.MULTILINE)
    assert (found, fields) == (["recipe_again"], ["recipe"]), "who hands it on, and `Resolved` that has it"
    again = {name for name, of in text.items() if "recipe_again" in of}
    assert again == {"tuner.setup.resolve", "tuner.run.state", "tuner.profile.watch", "tuner.run.tasks.windows"}
