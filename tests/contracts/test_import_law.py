"""The import law of the design, read from every import statement: lazy ones and those for type checking included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tests.contracts.syntax import ROOT, nodes, trees
from tests.fixtures.tables import cases

BASE = {"errors", "stages", "config", "runtime"}
MATHS = BASE | {"data", "model", "parallel"}
SETUP = MATHS | {"train", "setup", "checkpoint", "rundir", "init_from"}
LAUNCH = SETUP | {"profile", "export", "evals", "stores"}
# What each part of the package may import, besides itself.
LAW: dict[str, set[str]] = {
    "errors": set(),
    "stages": set(),
    "config": {"errors", "stages"},
    "runtime": {"errors", "stages"},
    "data": BASE | {"stores"},
    "model": BASE,
    "checkpoint": BASE,
    "stores": {"errors", "stages", "runtime"},
    "parallel": BASE | {"model"},
    "rundir": BASE | {"checkpoint", "stores"},
    "submit": BASE,
    "transformers_tokenizer": BASE | {"data"},
    "init_from": BASE | {"model", "checkpoint", "rundir"},
    "export": BASE | {"data", "model", "checkpoint", "rundir", "init_from"},
    "train": MATHS,
    "setup": MATHS | {"train", "rundir", "init_from"},
    "evals": MATHS | {"train"},
    "profile": SETUP,
    "prove": SETUP,
    "run": LAUNCH,
    "ladder": LAUNCH | {"run"},
    "generate": BASE | {"data", "model", "checkpoint", "rundir", "export"},
    "api": LAUNCH | {"prove", "run", "generate", "ladder"},
    "cli": LAUNCH | {"prove", "run", "ladder", "generate", "submit"},
    "": {"api"} | BASE,
    "__main__": {"cli"},
}
HEAVY = {"torch", "transformers", "peft", "datasets", "liger_kernel", "accelerate"}
# These never import torch or transformers, not even inside a function.
NEVER_HEAVY = {"errors", "stages", "stores", "config", "data", "rundir"}
# These may, but only inside a function.
LAZILY_HEAVY = {"runtime", "cli", ""}
# These are loaded with torch only: they stand on its process groups, its private names and its CUDA runtime.
_WITH_TORCH = ("deterministic", "device", "host", "numa", "process", "torch_private")
HEAVY_MODULES = {f"tuner.runtime.{name}" for name in _WITH_TORCH}
# What commands do once their arguments are read: it may load torch, and is itself imported only inside functions.
WORK = "tuner.cli.work."
# Who may see the whole recipe; everything else gets its own section or plain values.
SEES_RECIPE = {"config", "setup", "profile", "prove", "ladder", "cli", "api"}
RESOLVED_IN: Any = cases(__file__, "resolved_in")
ASKED_FOR = "tuner.run.parts."
"""Each says what in a recipe asks for it."""
SEES_RECIPE_FILES = {f"tuner.{name}" for name in RESOLVED_IN}
# What of a launch knows an instrument: modules that are imported, or import it, only where a recipe or command asks.
INSTRUMENTS: Any = cases(__file__, "instruments")


def part(module: str) -> str:
    """The part of the package that a module belongs to: `tuner.data.batches` -> `data`."""
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute dotted name imported anywhere, with its line; a name imported from a module counts too."""
    for plain in nodes(tree, ast.Import):
        for alias in plain.names:
            yield alias.name, plain.lineno
    for node in nodes(tree, ast.ImportFrom):
        assert node.level == 0, "relative imports are banned"
        yield node.module or "", node.lineno
        for alias in node.names:
            yield f"{node.module}.{alias.name}", node.lineno


def imported_modules(tree: ast.AST, known: Iterable[str]) -> set[str]:
    """The package's modules that a tree imports. The root is left out: importing any module imports it first."""
    return ({name for name, _ in imports(tree)} & set(known)) - {"tuner"}


def unlawful(module: str, tree: ast.AST) -> list[str]:
    """What in this module breaks the law, one line each."""
    own = part(module)
    problems = []
    for name, line in imports(tree):
        if not name.startswith("tuner."):
            continue
        target = part(name)
        if target not in LAW:
            continue  # a name of the root package, such as its version
        instrument = own == "run" and target in INSTRUMENTS.values() and INSTRUMENTS.get(module) != target
        if target not in LAW[own] | {own} or instrument:
            problems.append(f"{module}:{line} imports {name}: {own or 'tuner'} may not know {target}")
        sees = own in SEES_RECIPE or module in SEES_RECIPE_FILES or module.startswith(ASKED_FOR)
        if name == "tuner.config.recipe.Recipe" and not sees:
            problems.append(f"{module}:{line} sees the whole recipe")
    return problems


def heavy(tree: ast.AST, top_level_only: bool) -> list[str]:
    """Imports of heavy libraries: anywhere, or only where importing the module would run them."""
    looked_at: Iterable[ast.AST] = at_import(tree) if top_level_only else nodes(tree, ast.Import, ast.ImportFrom)
    found = []
    for node in looked_at:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        found += [f"line {node.lineno}: {name}" for name in names if name.split(".")[0] in HEAVY]
    return found


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: outside functions and outside `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from at_import(child)


def running(module: str) -> ast.Module:
    """The statements of a module that run when it is imported, `if TYPE_CHECKING` left out."""
    return ast.Module([node for node in trees()[module].body if not isinstance(node, ast.If)], [])


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of the graph, or nothing."""
    done: set[str] = set()
    trail: list[str] = []

    def visit(node: str) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        trail.append(node)
        for target in sorted(graph[node]):
            found = visit(target)
            if found:
                return found
        trail.pop()
        done.add(node)
        return []

    for start in sorted(graph):
        found = visit(start)
        if found:
            return found
    return []


def in_parts(parts: set[str]) -> dict[str, ast.Module]:
    """The modules of some parts of the package that are loaded without torch."""
    return {name: tree for name, tree in trees().items() if part(name) in parts and name not in HEAVY_MODULES}


def test_every_part_is_in_the_law() -> None:
    assert {part(name) for name in trees()} <= set(LAW)


def test_modules_import_only_what_they_may() -> None:
    assert [problem for name, tree in trees().items() for problem in unlawful(name, tree)] == []


def test_there_is_no_cycle_of_modules() -> None:
    """The rules that a section brings read the recipe that it is part of: for the type checker alone that is none."""
    graph = {name: imported_modules(tree, trees()) - {name} for name, tree in trees().items()}
    for name in graph:
        if part(name) == "config" and "tuner.config.recipe" not in imported_modules(running(name), trees()):
            graph[name] -= {"tuner.config.recipe"}
    assert cycle(graph) == []


def test_light_parts_never_import_torch() -> None:
    light = in_parts(NEVER_HEAVY)
    assert len(light) > 50
    assert {name: found for name, tree in light.items() if (found := heavy(tree, top_level_only=False))} == {}


def test_lazy_parts_import_torch_only_inside_functions() -> None:
    lazy = in_parts(LAZILY_HEAVY)
    assert len(lazy) > 50
    assert {name: found for name, tree in lazy.items() if (found := heavy(tree, top_level_only=True))} == {}


def test_light_modules_leave_torch_unloaded() -> None:
    light = sorted(name for name in in_parts(NEVER_HEAVY | LAZILY_HEAVY) if not f"{name}.".startswith(WORK))
    code = f"import sys, importlib\nfor name in {light!r}: importlib.import_module(name)\n"
    code += f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_what_commands_do_is_imported_only_inside_functions() -> None:
    at_top = {
        name: {f"{node.module}." for node in at_import(tree) if isinstance(node, ast.ImportFrom)}
        for name, tree in trees().items()
        if not f"{name}.".startswith(WORK)
    }
    assert {name for name, found in at_top.items() if any(each.startswith(WORK) for each in found)} == set()


def test_the_law_catches_what_it_forbids() -> None:
    lazy = ast.parse("def f() -> None:\n    from tuner.train.loop import loop\n")
    typed = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tuner.data.batches\n")
    assert unlawful("tuner.export.hf", lazy)
    assert unlawful("tuner.model.build", typed)
    assert unlawful("tuner.model.build", ast.parse("from tuner.config.recipe import Recipe"))
    assert not unlawful("tuner.parallel.fsdp", ast.parse("from tuner.model.build import build_model"))
    assert heavy(ast.parse("def f() -> None:\n    import torch.nn"), top_level_only=False)
    assert not heavy(ast.parse("def f() -> None:\n    import torch.nn"), top_level_only=True)
    assert heavy(ast.parse("class A:\n    import torch"), top_level_only=True)
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
