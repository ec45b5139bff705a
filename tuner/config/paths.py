"""Paths in a recipe: `~` and `${VAR}` expand, and relative ones start from where they were written.

What names a directory in an object store becomes its stage, which :func:`with_urls` writes as the URL again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuner.config.chat_templates import CHAT_TEMPLATES, is_template_word
from tuner.config.eval_tasks import FILES, HARNESS
from tuner.config.recipe import ITEMS, is_split
from tuner.config.yaml import KeyPath, Node, Problems, dotted
from tuner.stages import is_url, stage_of, url_of

_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_HUB_ROWS = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?):[A-Za-z0-9][\w.+-]*(?:\[[^\[\]]*\])?")
_LOCAL = ("./", "../", "/")
_LOCAL_WORDS = {".", ".."}


def recipes_dir() -> Path:
    """Return the directory of the shipped recipes: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def resolve_paths(tree: Node, problems: Problems) -> None:
    """Make every path in the tree absolute, in place; hub names and keywords stay as they are."""
    for path, node in tree.leaves():
        resolve = _RESOLVERS.get(_key_of(path))
        if resolve is None or not isinstance(node.value, str) or not node.value.strip() or not node.value.isprintable():
            continue
        if path == ("data", "eval") and is_split(node.value):
            continue
        unset = [name for name in _VARIABLE.findall(node.value) if name not in os.environ]
        if unset:
            problems.add(node.where, dotted(path), f"got {node.value!r}; the environment has no {unset[0]}")
            continue
        text = _VARIABLE.sub(lambda match: os.environ[match[1]], node.value)
        if text.startswith("~") and (text == "~" or text[1] == "/"):
            text = os.environ.get("HOME", "~") + text[1:]
        if is_url(text):
            _place(node, path, text, problems)
        else:
            node.value = resolve(text, node.base)


def with_urls(recipe: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A recipe's plain values with the URLs of stores in place of their stages, wherever a recipe may have them."""

    def written(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return with_urls(value, f"{key}.")
        if isinstance(value, (list, tuple)):
            return [written(item, key) for item in value]
        is_place = isinstance(value, str) and {key, f"{key}.path"} & IN_STORES
        return value if not is_place or not os.path.isabs(value) else url_of(Path(value)) or value

    return {name: written(value, f"{above}{name}") for name, value in recipe.items()}


def _place(node: Node, path: KeyPath, url: str, problems: Problems) -> None:
    """Have the stage of a store's directory in place of its URL, and a path in place of that of a file."""
    try:
        stage = stage_of(url)
    except ValueError as error:
        problems.add(node.where, dotted(path), f"got {url!r}: {error}")
        return
    if url_of(stage) is not None and _key_of(path) not in IN_STORES:
        problems.add(node.where, dotted(path), f"got {url!r}: this lies on a disk; in a store may be {_IN_STORES}")
        return
    node.value = str(stage)


def _key_of(path: KeyPath) -> str:
    """The key that a value is of; a bare item of a list of sections is their first key."""
    key = ".".join(part for part in path if isinstance(part, str))
    return f"{key}.{next(iter(ITEMS[key].section.model_fields))}" if key in ITEMS else key


def _task(text: str, base: Path) -> str:
    """A file of items or code is a path; a task of lm-evaluation-harness and an entry point are names."""
    if text.startswith(HARNESS):
        own = text.removeprefix(HARNESS)
        return f"{HARNESS}{_always(own, base)}" if own.endswith(".yaml") else text
    return _always(text, base) if text.endswith(FILES) else _plugin(text, base)


def _always(text: str, base: Path) -> str:
    return str(Path(os.path.normpath(base / text)))


def _plugin(text: str, base: Path) -> str:
    """`file.py:Name` is a file; anything else the name of an entry point."""
    file, colon, name = text.rpartition(":")
    return f"{_always(file, base)}:{name}" if colon and file.endswith(".py") else text


def _rows(text: str, base: Path) -> str:
    """`-` is stdin, and `owner/name:split` a hub data set unless something of that name lies here."""
    hub = _HUB_ROWS.fullmatch(text)
    if text == "-" or (hub is not None and not (base / text).exists() and not (base / hub[1]).exists()):
        return text
    return _always(text, base)


def _template(text: str, base: Path) -> str:
    """The name of a built-in template stays, and so does a word that is none: it is refused by its name."""
    is_name = text in CHAT_TEMPLATES or (is_template_word(text) and not (base / text).exists())
    return text if is_name else _always(text, base)


def _hub_or_path(text: str, base: Path) -> str:
    looks_local = text.startswith(_LOCAL) or text in _LOCAL_WORDS
    return _always(text, base) if looks_local or (base / text).exists() else text


IN_STORES = frozenset(
    {"output_dir", "model.name_or_path", "model.init_from.path", "data.train.path", "data.eval.path", "data.cache_dir"}
)
"""The keys of what may lie in an object store."""
_IN_STORES = ", ".join(sorted(IN_STORES))
_WITH_CODE = ("model", "tokenizer", "method", "optimizer", "schedule", "hooks", "data.train", "data.eval")
_RESOLVERS: Mapping[str, Callable[[str, Path], str]] = {
    **dict.fromkeys(("output_dir", "model.init_from.path", "data.cache_dir", "train.stop_file"), _always),
    **dict.fromkeys(("model.name_or_path", "method.teacher"), _hub_or_path),
    **dict.fromkeys(("data.train.path", "data.eval.path"), _rows),
    **dict.fromkeys((*(f"{key}.use" for key in _WITH_CODE), "eval.tasks.scorer"), _plugin),
    "tokenizer.name_or_path": lambda text, base: text if text == "byte" else _hub_or_path(text, base),
    "tokenizer.chat_template": _template,
    "eval.tasks.task": _task,
}
"""The keys that are paths, and what becomes of each."""
