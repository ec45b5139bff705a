"""Sentences that people read are English as this field writes it: none of the turns that grew here and nowhere else.

Read are the pages (without code), and in `tuner/` every string that may be shown: sentences under the recipe's fields,
help, hints, messages, and what HTML pages show. Docstrings and comments speak to people who change the code.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.contracts.syntax import PACKAGE, ROOT, modules, trees, walk
from tests.fixtures.tables import cases

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DRAWN = sorted(PACKAGE.rglob("*.html"))
PHRASES: Any = cases(__file__, "phrases")
"""What is not written, and what is meant by it."""
ANY = re.compile("|".join(PHRASES), flags=re.IGNORECASE)
CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)|`[^`\n]*`|\]\([^)\n]*\)|<!--.*?-->", flags=re.MULTILINE | re.DOTALL)


def findings(text: str) -> list[str]:
    """The phrases of a text that are not to be written."""
    return [match[0] for match in ANY.finditer(text)]


def prose(text: str) -> str:
    """A page without its code, and with each paragraph in one line."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", CODE.sub("", text))


def drawn(html: str) -> str:
    """What a page that the program writes may show: its text, and the strings of its script."""
    scripts = "\n".join(re.findall(r"<script.*?</script>", html, flags=re.DOTALL))
    strings = re.findall(r'"(?:[^"\\\n]|\\.)*"|`[^`]*`', re.sub(r"/\*.*?\*/", "", scripts, flags=re.DOTALL))
    text = re.sub(r"<(script|style).*?</\1>|<!--.*?-->|<[^>]+>", " ", html, flags=re.DOTALL)
    return "\n".join([text, *strings])


def silent(every: Iterable[ast.AST], package: str) -> set[int]:
    """The strings among nodes that stand alone and are for people who change the code: help is made of docstrings in
    `cli` alone, and of sentences under a field in `config`.
    """
    found = set()
    for node in every:
        body = getattr(node, "body", None)
        for number, item in enumerate(body if isinstance(body, list) else []):
            if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
                is_help = isinstance(node, ast.FunctionDef) and package == "cli"
                if not (is_help if number == 0 else package == "config"):
                    found.add(id(item.value))
    return found


def shown(tree: ast.Module, package: str = "") -> Iterator[str]:
    """The strings of a module that people may be shown; one with values in it is one string."""
    every = walk(tree)
    left_out = silent(every, package)
    for node in every:
        if isinstance(node, ast.JoinedStr):
            left_out |= {id(part) for part in walk(node)}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def test_pages_are_english() -> None:
    found = {page: findings(prose(page.read_text(encoding="utf-8"))) for page in PAGES}
    found |= {page: findings(drawn(page.read_text(encoding="utf-8"))) for page in DRAWN}
    assert len(found) > 70
    assert {page: phrases for page, phrases in found.items() if phrases} == {}, "see PHRASES for what to write"


def test_what_the_program_says_is_english() -> None:
    places = {name: path.relative_to(PACKAGE).parts[0] for name, path in modules().items()}
    found = {name: findings("\n".join(shown(tree, places[name]))) for name, tree in trees().items()}
    found |= {path.name: findings(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.json")}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}, "see PHRASES for what to write"


@pytest.mark.parametrize("sentence", cases(__file__, "what_reads_as_translated_is_found"))
def test_what_reads_as_translated_is_found(sentence: str) -> None:
    assert findings(sentence)


def test_what_is_read() -> None:
    tree = ast.parse('''"""Behind."""
class Recipe:
    """Behind."""
    key: int = 1
    """Anew."""
def fail(name):
    """Beside."""
    raise ValueError(f"mend {name:>5}", "go on")
''')
    assert findings("\n".join(shown(tree))) == ["mend", "go on"]
    assert findings("\n".join(shown(tree, "cli"))) == ["Beside", "mend", "go on"]
    assert findings("\n".join(shown(tree, "config"))) == ["Anew", "mend", "go on"]
    assert findings(prose("`beside`\n```sh\n$ x behind\n```\n[a](mend.md) going\non")) == ["going on"]
    page = '<p>beside</p><style>.told{}</style><script>/* mend */ const behind = "anew" + `go on`;</script>'
    assert findings(drawn(page)) == ["beside", "anew", "go on"]
    assert findings("go along; a told-off; on and on") == ["told"]
