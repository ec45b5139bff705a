"""What a hint proposes exists: every key with its value, every flag, every command that a text of the program names."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contracts.syntax import modules, nodes, trees, walk
from tests.fixtures.tables import cases
from tuner.config.fields import fields, find, item_fields
from tuner.config.recipe import ITEMS
from tuner.config.value_types import Table, ValueType
from tuner.config.yaml import Problems, read_yaml

TUNER = Path(__file__).resolve().parents[2] / "tuner"
HOLE = "\N{SECTION SIGN}"
"""What stands in a text for a value that is put in."""
_KEY = re.compile(
    r"(?<![\w./-])([a-z_]+\.[a-z_]+(?:\.[a-z_0-9]+)*): "
    r"(\[[^\]]*\]|\{[^}]*\}|[^,;()`:]+?)(?=[,;()`:]|\.$|\. | and | or | with |$)"
)
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_.-]+)")
_COMMAND = re.compile(r"(?<![\w./-])tuner ([a-z][a-z-]+)(?= |$|[.,;)])")
_STANDS_FOR_A_VALUE = re.compile(r"[A-Z]|\.\.\.|" + HOLE)


class Text(NamedTuple):
    """A text of the program, and where it stands."""

    where: str
    said: str


def _said(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (_said(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        return "".join(part or "" for part in parts)
    return None


def _texts(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Every text of a file but its docstrings, those of which a longer one is made left out."""
    left_out: set[ast.AST] = {node.value for node in nodes(tree, ast.Expr)}
    for longer in nodes(tree, ast.JoinedStr):
        left_out.update(node for node in walk(longer) if isinstance(node, ast.Constant))
    for node in nodes(tree, ast.Constant, ast.JoinedStr):
        said = _said(node) if node not in left_out else None
        if said is not None and " " in said:
            yield Text(f"{path.relative_to(TUNER)}:{node.lineno}", said)


TEXTS = [text for name, path in modules().items() for text in _texts(path, trees()[name])]
TEXTS += [
    Text(f"{path.name}:{name}", re.sub(r"\{[a-z_.]+\}", HOLE, said))
    for path in (TUNER / "config").glob("*rules.json")
    for name, rule in json.loads(path.read_text(encoding="utf-8")).items()
    for said in rule["wrong"]
]
SECTIONS = {key.split(".")[0] for key in fields() if "." in key}


def _options() -> set[str]:
    """Every flag that a command declares, read from the sources and tables of `tuner/cli`."""
    found = {"help", "version", "debug", "json", "quiet", "verbose", "no-color"}
    parameters = json.loads((TUNER / "cli/commands.json").read_text(encoding="utf-8"))["parameters"]
    names = [row.get("names", "") for rows in parameters.values() for row in rows.values() if isinstance(row, dict)]
    found |= {name.removeprefix("--") for text in names for name in text.split()}
    for path in (TUNER / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                found |= {part.lstrip("-").partition(" ")[0] for part in node.value.split("/")}
            if isinstance(node, ast.arg):
                found.add(node.arg.replace("_", "-"))
    return found


def _is_key(key: str) -> bool:
    plain = key.replace("-", "_")
    owner, _, name = plain.rpartition(".")
    return find(plain) is not None or (owner in ITEMS and name in item_fields(owner)) or plain in SECTIONS


def refused(said: str) -> list[str]:
    """Keys that a text asks to write with a value that they do not take; a text that begins with one reports on it."""
    found = []
    for match in _KEY.finditer(said):
        key, value = match[1], match[2]
        field = find(key)
        is_file = key.endswith((".json", ".txt"))
        if key.split(".")[0] not in SECTIONS or is_file or _STANDS_FOR_A_VALUE.search(value):
            continue
        if field is None and not any(name.startswith(f"{key}.") for name in fields()):
            found.append(key)
        elif (
            field is not None
            and field.value_type is not None
            and not isinstance(field.value_type, Table)
            and match.start() > 0
        ):
            first = value if value[0] in "[{" else value.split()[0]  # what follows may be a sentence
            if not (_takes(field.value_type, value) or _takes(field.value_type, first)):
                found.append(f"{key}: {value}")
    return found


def _takes(value_type: ValueType, text: str) -> bool:
    problems = Problems()
    node = read_yaml(f"value: {text}", "value", TUNER, problems).child("value")
    try:
        value_type.check(node.plain() if node is not None else None)
    except ValueError:
        return False
    return not problems.found


def test_every_key_that_a_text_gives_a_value_takes_it() -> None:
    assert {text.where: wrong for text in TEXTS if (wrong := refused(text.said))} == {}


@pytest.mark.parametrize(("said", "wrong"), cases(__file__, "a_key_or_value_that_is_not_there_is_found"))
def test_a_key_or_value_that_is_not_there_is_found(said: str, wrong: list[str]) -> None:
    assert refused(said) == wrong


def test_every_flag_that_a_text_names_is_there() -> None:
    known = _options()
    wrong = [
        (text.where, flag)
        for text in TEXTS
        for flag in _FLAG.findall(text.said)
        if flag.rstrip(".-") not in known and not _is_key(flag.rstrip(".-"))
    ]
    assert [one for one in wrong if (one[0].partition(":")[0], one[1]) not in OF_OTHERS] == []


def test_every_command_that_a_text_names_is_there() -> None:
    from tuner.cli.commands import COMMANDS

    wrong = [
        (text.where, name) for text in TEXTS for name in _COMMAND.findall(text.said)
        if name not in COMMANDS and name not in WORDS_AFTER_TUNER
    ]  # fmt: skip
    assert wrong == []


OF_OTHERS = {
    ("cli/work/eval.py", "nproc-per-node"), ("cli/flags.py", "section.key"), ("ladder/launch.py", "array"),
}  # fmt: skip
"""Flags of torchrun, sbatch and fish, and the form of all of ours, with the file that names them."""
WORDS_AFTER_TUNER = {"that", "commands", "is", "does", "refuses", "needs"}
"""What follows the name in a sentence, where it is no command."""


def test_there_are_texts_to_look_at() -> None:
    assert sum(bool(_KEY.search(text.said)) for text in TEXTS) > 200
