"""Training stays readable: short functions, small classes, a loop on one screen that knows no method."""

import ast

from tests.contracts.syntax import nodes, trees

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
