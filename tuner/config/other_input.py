"""What a configuration, or a training command, of another tool says: its values by dotted key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tuner.config.not_supported import absent
from tuner.config.other_commands import is_script, read_script
from tuner.config.other_configs import TOOLS, Tool
from tuner.config.tree import Node, Problems
from tuner.config.yaml import read_yaml
from tuner.errors import RecipeError

_SINGLE = ("column_map", "deepspeed", "fsdp", "datasets", "dataset", "test_datasets", "val_dataset", "eval_dataset",
           "special_tokens", "tokens", "lora_target_modules", "target_modules", "lr_scheduler_kwargs",
           "lora_modules_to_save")  # fmt: skip
"""Keys whose mapping or list is one value."""


def read_given(text: str, name: str, processes: int | None, directory: Path) -> tuple[dict[str, Any], Tool | None]:
    """Every value of a configuration by its dotted key; of a command its flags, over the file that it names.

    And the tool whose program a command runs. Raises RecipeError where it cannot be read.
    """
    tool: Tool | None = None
    if is_script(text, name):
        command = read_script(text, name)
        tool = next((known for known in TOOLS if known == command.tool), None)
        processes = processes or command.processes
        base = {} if command.config is None else _values(_file(directory / command.config), command.config, directory)
        given = base | _values(json.dumps(command.flags), name, directory)
    else:
        given = _values(text, name, directory)
    return given | {"processes": processes or 1}, tool


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: the file that the command reads: {error.strerror}") from None


def _values(text: str, name: str, directory: Path) -> dict[str, Any]:
    problems = Problems()
    tree = read_yaml(text, name, directory, problems, aliases=True)
    if problems.found:
        raise RecipeError.of(problems.found)
    return _given(tree)


def _given(tree: Node) -> dict[str, Any]:
    """Every value that is written, by its dotted key; `${key}` in a text is that key's value."""
    found: dict[str, Any] = {}

    def walk(node: Node, path: tuple[str, ...]) -> None:
        name = ".".join(path)
        is_component = isinstance(node.value, dict) and "_component_" in node.value
        whole = bool(path) and (path[-1] in _SINGLE or absent(path[-1]) is not None)
        if path and (whole or not isinstance(node.value, dict)):
            found[name] = node.plain()
        if isinstance(node.value, dict) and (not whole or is_component):
            for key, child in node.value.items():
                walk(child, (*path, key))

    walk(tree, ())
    texts = {key: value for key, value in found.items() if isinstance(value, str)}
    for key, value in texts.items():
        found[key] = re.sub(r"\$\{(\w+)\}", lambda match: str(found.get(match[1], match[0])), value)
    return found


def dataset_info(directory: Path, name: str) -> dict[str, Any]:
    """LLaMA-Factory's table of data sets; empty where it is not there."""
    path = directory / name / "dataset_info.json"
    if not path.is_file():
        return {}
    tree = read_yaml(path.read_text(encoding="utf-8"), path.name, directory, Problems(), aliases=True)
    plain = tree.plain()
    return plain if isinstance(plain, dict) else {}
