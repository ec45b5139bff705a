"""Every text of the program that proposes a line, a flag or a command, found in the sources of `tuner`.

A text counts where it stands as advice (in a `hint`, or as the second argument of an error) and names a key with a
value, a flag or a command; anywhere else, where it says to write or to set something. What `rows`, `keys` and `files`
follow already is left out.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tuner.config.fields import fields

TUNER = Path(__file__).resolve().parents[2] / "tuner"
HOLE = "\N{SECTION SIGN}"
"""What stands in a text for a value that is put in."""
FOLLOWED_ELSEWHERE = (
    "config/advice.py", "config/imported.py", "config/other_", "data/reading/proposals.py", "cli/app.py",
)
"""Files whose proposals are followed by the other parts, by the beginnings of their names."""
_WRITE = re.compile(r"(?<!cannot )\b(?:write|set) (?!a commented\b|out\b|HF_|WANDB|MASTER|up\b|-l\b|by\b|is\b|of\b)\S")
_FLAG = re.compile(r"(?<![\w-])--[a-z]")
_COMMAND = re.compile(r"\btuner (?!does\b|refuses\b|that\b|is\b)[a-z][a-z-]+(?= |$|[;,])")
_KEY = re.compile(r"(?<![\w./-])((?:[a-z_]+\.)*[a-z_]+): ?(?=\S)")
_FLAGS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.Name, ast.arguments)
_TELLS = re.compile(
    r"(?:(?<!combined )\b(?:add|leave out|use|with(?!out)|give)\S*|(?:run|here):) --[a-z]"
    r"|(?:: |&& )tuner (?!ends\b|help\b)[a-z]"
)
_SAYS = ("hint", "Error(", ": tuner ")
_HELP = {"help", "metavar", "epilog", "short_help"}


class Site(NamedTuple):
    """A text that proposes something, and the function that says it; `text` has holes for values that are put in."""

    file: str
    function: str
    text: str

    @property
    def name(self) -> str:
        """The site as cases name it; a beginning of it is enough."""
        return f"{self.file}:{self.function}: {self.text.strip()}"

    def found_in(self, line: str) -> bool:
        """Whether a line of output may have been said here."""
        parts = [re.escape(part) for part in self.text.strip().split(HOLE)]
        return re.search(".*?".join(parts), line) is not None


@functools.cache
def sites() -> tuple[Site, ...]:
    """All of them, in the order of the sources; one for texts that are the same in one function."""
    found: dict[Site, None] = {}
    for path in sorted(TUNER.rglob("*.py")):
        file, text = str(path.relative_to(TUNER)), path.read_text(encoding="utf-8")
        if not file.startswith(FOLLOWED_ELSEWHERE) and (_WRITE.search(text) or any(part in text for part in _SAYS)):
            found |= dict.fromkeys(Site(file, *one) for one in _texts(ast.parse(text), "", False))
    for path in sorted((TUNER / "config").glob("*rules.json")):
        for name, rule in json.loads(path.read_text(encoding="utf-8")).items():
            texts = (re.sub(r"\{[a-z_.]+\}", HOLE, text) for text in rule["wrong"])
            found |= {Site(f"config/{path.name}", name, text): None for text in texts if _proposes(text, False)}
    return tuple(found)


@functools.cache
def _names() -> set[str]:
    return {part for key in fields() for part in (key, key.rpartition(".")[2], key.partition(".")[0])}


def _proposes(text: str, is_advice: bool) -> bool:
    if " " not in text.strip():
        return False
    named = any(match[1] in _names() for match in _KEY.finditer(text))
    says = _WRITE.search(text) or _TELLS.search(text)
    return bool(says or (is_advice and (named or _FLAG.search(text) or _COMMAND.search(text))))


def _texts(node: ast.AST, function: str, is_advice: bool) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        function = f"{function}.{node.name}" if function else node.name
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    if isinstance(node, ast.keyword):
        if node.arg in _HELP:
            return
        is_advice = is_advice or node.arg == "hint"
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        named = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_advice = is_advice or any(isinstance(one, ast.Name) and "hint" in one.id.lower() for one in named)
    if (text := said(node)) is not None:
        if _proposes(text, is_advice):
            yield function, text
        return
    second = None
    if isinstance(node, ast.Call) and len(node.args) > 1:
        called = str(getattr(node.func, "id", None) or getattr(node.func, "attr", ""))
        second = node.args[1] if called.endswith("Error") else None
    for value in vars(node).values():
        for child in value if isinstance(value, list) else (value,):
            if isinstance(child, ast.AST) and not isinstance(child, _FLAGS):
                yield from _texts(child, function, is_advice or child is second)


def said(node: ast.AST) -> str | None:
    """The text of a constant or of an f-string, with holes; None of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join((said(part) if isinstance(part, ast.Constant) else HOLE) or "" for part in node.values)
    return None
