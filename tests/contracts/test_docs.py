"""Every command in the documents exists, with every flag it is shown with, and every link leads somewhere."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shlex
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import tuner
from tests.fixtures import commands
from tuner import api

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
GROUPS = {"config", "data", "recipes", "runs"}


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
def help_text(*command: str) -> str:
    """What `--help` of a command prints, on one line."""
    done = commands.tuner(*command, "--help", cwd=ROOT, COLUMNS="200", NO_COLOR="1")
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@functools.lru_cache(maxsize=1)
def recipe_flags() -> set[str]:
    """Every recipe key by its dotted name."""
    from tuner.config.fields import fields

    return set(fields())


def test_documents_show_commands() -> None:
    assert len(documented()) > 5


@pytest.mark.parametrize(("document", "command"), documented())
def test_documented_command_exists(document: str, command: str) -> None:
    words = shlex.split(command)[1:]
    depth = 2 if words[0] in GROUPS else 1
    text = help_text(*words[:depth]) if not words[0].startswith("-") else help_text()
    for word in words[depth:]:
        flag = word.split("=")[0]
        if not flag.startswith("-") or flag == "-":
            continue
        if re.fullmatch(r"--\w+(\.\w+)+", flag) or flag.removeprefix("--") in recipe_flags():
            assert flag.removeprefix("--") in recipe_flags(), f"{document}: {flag} is no recipe key"
        else:
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text), (
                f"{document}: no {flag} in {words[:depth]}"
            )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_yaml_blocks_are_recipes(path: Path, tmp_path: Path) -> None:
    from tuner.config.load import load_recipe

    for number, text in enumerate(blocks(path, "yaml")):
        (tmp_path / "rows.jsonl").touch()
        document = YAML(typ="safe").load(text)
        document.setdefault("model", {"name_or_path": "model"})
        document.setdefault("data", {"train": "rows.jsonl"})
        recipe = load_recipe(document, cwd=tmp_path).recipe
        assert recipe.version == 1, f"block {number}"


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
                inspect.signature(getattr(api, call.func.id)).bind(*call.args, **keywords)
                calls += 1
    assert calls > 0


def test_pieces() -> None:
    assert pieces("tuner train r.yaml --json | tuner export-hf - > out  # a note") == [
        "tuner train r.yaml --json",
        "tuner export-hf -",
    ]
    assert pieces("torchrun --nproc-per-node 2 --no-python tuner train r.yaml") == ["tuner train r.yaml"]
    assert pieces("make test") == []
