"""What grows when nobody looks: lines of code, lazy imports, patched layers, recipes read below their resolution.

Each number is today's: it falls with the code, and rises only where a change weighs what it adds and says so here.
Training stays readable: short functions, small classes, a loop on one screen that knows no method. What tests share is
in `tests/fixtures` or a helper next to them: never a tool, outside the tests of tools.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from tests.contracts.syntax import ROOT, modules, nodes, trees

LINES = {"tuner": 61_112, "tests": 53_694, "tools": 17_564}
"""Of code: without docstrings, comments and blank lines."""
SPINE = ("train/loop", "train/step", "parallel/assemble", "run/main", "run/preflight", "setup/build", "model/root")
SPINE_LINES = 1_741
"""Of these and of checkpoint/, which are what every training is: read top to bottom in an hour (docs/code.md)."""
LAZY_IMPORTS = 279


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
    assert others == {("tuner.profile.tracing", "each.parts.most_forwards")}, "which stands in for the other processes"


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
    assert again == {"tuner.setup.resolve", "tuner.run.begin", "tuner.profile.watch", "tuner.run.tasks.windows"}


PARTS = ("tuner.train.", "tuner.setup.", "tuner.run.")
MOST_LINES = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 250}
SCREEN_LINES = 45


def length(node: ast.stmt) -> int:
    """Lines of a definition."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def too_long(tree: ast.AST) -> dict[str, int]:
    """Name and length in lines of every definition that is longer than it may be."""
    found = [(node.name, length(node), most) for kind, most in MOST_LINES.items() for node in nodes(tree, kind)]
    return {name: lines for name, lines, most in found if lines > most}


def test_functions_and_classes_are_short() -> None:
    looked_at = {name: tree for name, tree in trees().items() if f"{name}.".startswith(PARTS)}
    assert len(looked_at) > 100
    assert {name: found for name, tree in looked_at.items() if (found := too_long(tree))} == {}


def test_the_loop_is_one_screen_without_method_or_rank() -> None:
    loop = next(node for node in nodes(trees()["tuner.train.loop"], ast.FunctionDef) if node.name == "train_loop")
    assert length(loop) <= SCREEN_LINES
    asked = [name for node in ast.walk(loop) if isinstance(node, ast.If) for name in ast.walk(node.test)]
    names = {node.attr for node in asked if isinstance(node, ast.Attribute)}
    names |= {node.id for node in asked if isinstance(node, ast.Name)}
    assert not names & {"method", "kind", "rank", "is_main", "world_size"}


def test_no_two_classes_have_one_name() -> None:
    """A reader who searches for a class finds one."""
    names = [node.name for tree in trees().values() for node in nodes(tree, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


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
