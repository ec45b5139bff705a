"""Every command in the documents exists, with every flag it is shown with; links, names and messages are right.

docs/code.md and docs/code-places.md say how the code is laid out: what they name is there, no import goes up.
"""

import ast
import functools
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import tuner
from tests.contracts.syntax import PACKAGE, ROOT, modules, trees
from tests.contracts.test_import_law import imported_modules, part
from tests.contracts.test_language import shown
from tests.fixtures.tables import cases
from tuner.cli.app import help_text
from tuner.errors import TunerError

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", flags=re.MULTILINE)
GROUPS = {"config", "data", "ladder", "recipes", "runs"}


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language in a document."""
    return [text for kind, text in BLOCK.findall(path.read_text(encoding="utf-8")) if kind == language]


def documented() -> list[tuple[str, str]]:
    """Every `tuner` command that a document shows behind a `$`, with the document's name."""
    found = []
    for path in DOCUMENTS:
        for block in blocks(path, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    found += [(path.name, part) for part in pieces(line[2:])]
    return found


def pieces(line: str) -> list[str]:
    """The `tuner` commands of a pipeline, without redirections and what starts them."""
    parts = re.split(r"\s(?:\||&&|\|\|)\s", re.sub(r"\s#.*$", "", line))
    starts = (re.search(r"(?:^|\s)tuner\s.*", re.sub(r"\s>\s*\S+", "", part)) for part in parts)
    return [match[0].strip() for match in starts if match]


@functools.cache
def help_of(*command: str) -> str:
    """What `--help` of a command prints, on one line."""
    return " ".join(help_text(command).split())


@functools.lru_cache(maxsize=1)
def recipe_flags() -> set[str]:
    """Every recipe key by its dotted name."""
    from tuner.config.fields import fields

    return set(fields())


def test_documents_show_commands() -> None:
    assert len(documented()) > 5


def absent(command: str) -> list[str]:
    """The flags that a documented command is shown with and does not have."""
    words = shlex.split(command)[1:]
    depth = 2 if words[0] in GROUPS else 1
    text = help_of(*words[:depth]) if not words[0].startswith("-") else help_of()
    flags = [word.split("=")[0] for word in words[depth:] if word.startswith("-") and word != "-"]
    keys = [flag for flag in flags if re.fullmatch(r"--\w+(\.\w+)+", flag)]
    return [flag for flag in keys if flag.removeprefix("--") not in recipe_flags()] + [
        flag for flag in flags
        if flag not in keys and flag.removeprefix("--") not in recipe_flags()
        and not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
    ]  # fmt: skip


def test_documented_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = {(document, command): absent(command) for document, command in documented()}
    assert len(found) > 100
    assert {place: flags for place, flags in found.items() if flags} == {}
    assert absent("tuner train r.yaml --optimizer.lrr 1 --dry --seed 3 --json") == ["--optimizer.lrr", "--dry"]
    with pytest.raises(TunerError):
        absent("tuner runs sow")


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page: of each heading what GitHub and MkDocs both make of it."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = (re.sub(r"\[([^]]*)\]\([^)]*\)|[^\w\s-]", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"\s", "-", heading.strip().lower()) for heading in words}


def dead_links(path: Path) -> Iterator[str]:
    """The links of a page that lead nowhere, or out of the site."""
    for target, anchor in LINK.findall(path.read_text(encoding="utf-8")):
        page = path.parent / target if target else path
        inside = path.is_relative_to(ROOT / "docs")
        if not page.exists():
            yield f"{path.name}: {target}"
        elif anchor and anchor not in anchors(page.resolve()):
            yield f"{path.name}: no heading for {target}#{anchor}"
        elif inside and not page.resolve().is_relative_to(ROOT / "docs"):
            yield f"{path.name}: {target} is not in the site"


def test_links_lead_somewhere() -> None:
    assert len(DOCUMENTS) > 70
    assert [dead for path in DOCUMENTS for dead in dead_links(path)] == []


def test_scripts_that_are_named_are_there() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    named = {name for text in texts.values() for name in re.findall(r"\b(?:tools|tests)/[\w/]+\.py\b", text)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    """`make docs` builds with these pages; here is no MkDocs needed to know that each is reached."""

    def files(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        below = node if isinstance(node, list) else list(node.values())  # type: ignore[attr-defined]
        return [name for item in below for name in files(item)]

    site = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    assert sorted(files(site["nav"])) == sorted(pages)
    index = {target for target, _ in LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))}
    assert pages - index == {"README.md"}


PARENTS = {"from-arctictraining", "from-xtuner-v1", "from-olmo-core", "from-recis"}
"""Pages whose rows are held by tests/tools/test_parent_fields.py."""


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "docs" / "how-to").glob("from-*.md")) if path.stem not in PARENTS],
    ids=lambda path: path.stem,
)
def test_names_of_another_tool_are_those_of_the_table(path: Path) -> None:
    from tuner.config.other_tools import theirs

    row = re.compile(r"^\| `([\w.]+)` \| `([\w.]+)`", flags=re.MULTILINE)
    rows = row.findall(path.read_text(encoding="utf-8"))
    for other, ours in rows:
        assert theirs().get(other) == ours or ours.rpartition(".")[2] == other, f"{other} is not {ours}"
        assert ours in recipe_flags() or ours.startswith("data.train."), ours
    assert len(rows) > 8


@functools.cache
def strings() -> list[str]:
    """What each module of the program may say: its strings, with `…` for values, in one text."""
    return ["\n".join(shown(tree)) for tree in trees().values()]


def messages() -> list[str]:
    """The messages on the page of troubleshooting, each a heading."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.+)`$", page, flags=re.MULTILINE)


def test_messages_of_troubleshooting_are_those_of_the_program() -> None:
    assert len(messages()) > 30
    for message in messages():
        parts = [part.strip() for part in message.split("…") if part.strip("…() ")]
        assert parts and any(all(part in text for part in parts) for text in strings()), f"nothing says {message!r}"


def test_the_hook_of_the_how_to_asks_for_a_stop(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from tuner.runtime.plugins import load

    (code,) = blocks(ROOT / "docs" / "how-to" / "stop-early.md", "python")
    (tmp_path / "stop_at.py").write_text(code)
    hook: Any = load(f"{tmp_path}/stop_at.py:StopAt", "tuner.hooks")(loss=0.8)
    for loss, stops in ((0.9, False), (0.8, True)):
        hook(SimpleNamespace(metrics={"loss": loss}, run_dir=tmp_path))
        assert (tmp_path / "STOP").exists() == stops


def test_yaml_blocks_are_recipes(tmp_path: Path) -> None:
    from tuner.config.load import load_recipe

    (tmp_path / "rows.jsonl").touch()
    read = 0
    for path in DOCUMENTS:
        for number, text in enumerate(blocks(path, "yaml")):
            document = YAML(typ="safe").load(text)
            document.setdefault("model", {"name_or_path": "model"})
            document.setdefault("data", {"train": "rows.jsonl"})
            recipe = load_recipe(document, cwd=tmp_path).recipe
            assert recipe.version == 1, f"{path.name}: block {number}"
            read += 1
    assert read > 20


def test_python_blocks_use_the_api_as_it_is() -> None:
    """Every name that a block imports from `tuner` is public, and every call of it fits its signature."""
    calls = 0
    for text in (text for path in DOCUMENTS for text in blocks(path, "python")):
        tree = ast.parse(text)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "tuner"]
        names = {alias.name for node in imports for alias in node.names}
        assert names <= set(tuner.__all__)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in names:
                keywords = {str(word.arg): word.arg for word in call.keywords}
                inspect.signature(tuner.__getattr__(call.func.id)).bind(*call.args, **keywords)
                calls += 1
    assert calls > 0


def test_pieces() -> None:
    assert pieces("tuner train r.yaml --json | tuner export-hf - > out  # a note") == cases(__file__, "pieces")
    assert pieces("torchrun --nproc-per-node 2 --no-python tuner train r.yaml") == ["tuner train r.yaml"]
    assert pieces("make test") == []


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
