"""What a configuration of another tool, or a training command in a shell script, says: its values by dotted key."""

import json
import re
import shlex
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tuner.config.not_supported import absent
from tuner.config.other_configs import TOOLS, Tool
from tuner.config.other_tools import of_value
from tuner.config.yaml import package_table, resolve
from tuner.errors import RecipeError


def read_given(text: str, name: str, processes: int | None, directory: Path) -> tuple[dict[str, Any], Tool | None]:
    """Every value of a configuration by its dotted key; of a command its flags, over the file that it names.

    And the tool whose program a command runs. Raises RecipeError where it cannot be read.
    """
    tool: Tool | None = None
    if is_script(text, name):
        command = read_script(text, name)
        tool = next((known for known in TOOLS if known == command.tool), None)
        processes = processes or command.processes
        base = {} if command.config is None else _values(_file(directory / command.config), command.config)
        given = base | _given(command.flags)
    else:
        given = _values(text, name)
    return given | {"processes": processes or 1}, tool


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: the file that the command reads: {error.strerror}") from None


def _values(text: str, name: str) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return _given(YAML(typ="safe", pure=True).load(text))
    except (YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def _given(values: Any) -> dict[str, Any]:
    """Every value that is written, by its dotted key; `${key}` in a text is that key's value."""
    found: dict[str, Any] = {}
    single = package_table("other_data")["single"].split()

    def walk(value: Any, path: tuple[str, ...]) -> None:
        is_component = isinstance(value, dict) and "_component_" in value
        whole = bool(path) and (path[-1] in single or absent(path[-1]) is not None)
        if path and (whole or not isinstance(value, dict)):
            found[".".join(path)] = str(value) if isinstance(value, date) else value
        if isinstance(value, dict) and (not whole or is_component):
            for key, child in value.items():
                walk(child, (*path, str(key)))

    walk(values, ())
    texts = {key: value for key, value in found.items() if isinstance(value, str)}
    for key, value in texts.items():
        found[key] = re.sub(r"\$\{(\w+)\}", lambda match: str(found.get(match[1], match[0])), value)
    return found


def dataset_info(directory: Path, name: str) -> dict[str, Any]:
    """LLaMA-Factory's table of data sets; empty where it is not there."""
    path = directory / name / "dataset_info.json"
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return table if isinstance(table, dict) else {}


_LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "python", "python3"}
_PREFERENCES = "dpo|kto|orpo|cpo|reward|grpo|rloo|ppo|online_dpo"
_SCRIPT = re.compile(rf"(^|[/_])(sft|train|finetune|fine_tune|run_sft|{_PREFERENCES})\w*\.py$|/sft\.py$")
_SCRIPT_OF = re.compile(rf"(?:^|/)({_PREFERENCES})\w*\.py$")
"""A script of TRL whose name says what it trains."""
_PROCESSES = {"nproc_per_node", "nproc-per-node", "num_processes", "num_gpus"}
_VARIABLE = re.compile(r"(\w+)=(.*)", re.DOTALL)
_OPERATORS = {"&&", "||", ";", "|", "&"}


@dataclass(frozen=True)
class ShellCommand:
    """The flags of a training command by name, and on how many processes it runs, where it says that."""

    tool: str | None
    """Whose program it is; None for a launcher of any script."""
    flags: dict[str, Any]
    processes: int | None
    config: str | None
    """A file that the command reads its keys from; its flags come on top."""


def is_script(text: str, name: str) -> bool:
    """Whether a text is a shell script or a command line, by its name or its words."""
    return name.endswith((".sh", ".bash", ".sbatch")) or _first(text) is not None


def read_script(text: str, name: str) -> ShellCommand:
    """The first training command of a script. Raises RecipeError where there is none, or one of another kind."""
    found = _first(text)
    if found is None:
        raise RecipeError(
            f"{name}: no training command of a tool that is known",
            hint="known are swift sft, pt and rlhf, trl sft, dpo, kto and reward, llamafactory-cli train, axolotl "
            "train, and launchers of a script of these with flags",
        )
    words, variables = found
    program, rest = _program(words)
    known = _known(program)
    if rest and rest[0] in known.get("others", ()):
        kind = str(_flags(rest[1:]).get("rlhf_type", rest[0]))
        meant = of_value("method.kind", kind) or "not supported: a training of another kind"
        raise RecipeError(f"{name}: {program} {rest[0]}: {kind}: {meant}")
    if program in _LAUNCHERS:
        script = next(index for index, word in enumerate(rest) if _SCRIPT.search(word))
        before, flags = _flags(rest[:script]), _flags(rest[script + 1 :])
        if (trained := _SCRIPT_OF.search(rest[script])) is not None:
            flags = {"stage": trained[1]} | flags
    else:
        before, flags = {}, known["trains"][rest[0]] | _flags(rest[1:])
    counts = [str(before.get(key, "")) for key in _PROCESSES] + [variables.get("NPROC_PER_NODE", "")]
    processes = next((int(count) for count in counts if count.isdecimal()), None)
    config = flags.pop("config", None) or (rest[1] if len(rest) > 1 and rest[1].endswith((".yaml", ".yml")) else None)
    return ShellCommand(known.get("tool"), flags, processes, None if config is None else str(config))


def _first(text: str) -> tuple[list[str], dict[str, str]] | None:
    """The words of the first training command with the variables that are set before it, or None."""
    variables: dict[str, str] = {}
    for line in _lines(text):
        try:
            words = shlex.split(_expanded(line, variables), comments=True)
        except ValueError:  # a quote that is not closed: no line of a command
            continue
        for command in _commands(words):
            own = 0
            while own < len(command) and (set_here := _VARIABLE.fullmatch(command[own])):
                variables[set_here[1]] = set_here[2]
                own += 1
            if command[own : own + 1] == ["export"]:
                variables |= {found[1]: found[2] for word in command[own + 1 :] if (found := _VARIABLE.fullmatch(word))}
            elif _is_training(command[own:]):
                return command[own:], variables
    return None


def _lines(text: str) -> list[str]:
    """The lines of a script, continued ones joined."""
    return re.sub(r"\\[ \t]*\n", " ", text).splitlines()


def _expanded(line: str, variables: dict[str, str]) -> str:
    """A line with the variables that are known in place of their names; `${NAME:-x}` is x where none is set."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, line)


def _commands(words: list[str]) -> list[list[str]]:
    """The commands of a line, without what joins them."""
    found: list[list[str]] = [[]]
    for word in words:
        if word in _OPERATORS:
            found.append([])
        else:
            found[-1].append(word)
    return found


def _is_training(words: list[str]) -> bool:
    program, rest = _program(words)
    if program in _LAUNCHERS:
        return any(_SCRIPT.search(word) for word in rest)
    known = _known(program)
    return bool(rest) and rest[0] in (*known.get("trains", ()), *known.get("others", ()))


def _known(program: str) -> dict[str, Any]:
    """What a program of a tool trains; nothing of another one."""
    return dict(package_table("other_data")["commands"].get(program, {}))


def _program(words: list[str]) -> tuple[str, list[str]]:
    """The program that is run, without its directory, and its words; `srun`, `nohup` and their like are left out."""
    rest = list(words)
    while rest and rest[0] in {"nohup", "srun", "time", "exec", "uv", "run", "env", "sudo"}:
        rest.pop(0)
    return (rest[0].rpartition("/")[2], rest[1:]) if rest else ("", [])


def _flags(words: list[str]) -> dict[str, Any]:
    """`--key value ...`, `--key=value` and `key=value`; a flag alone is true, several values are a list."""
    found: dict[str, list[str]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, has_value, value = word[2:].partition("=")
            found[key] = [value] if has_value else []
        elif word in {">", "2>", ">>", "2>&1", "..."} or word.startswith((">", "2>")):
            key = ""
        elif key:
            found[key].append(word)
        elif (assigned := re.fullmatch(r"\+*([\w.]+)=(.*)", word)) is not None:
            found[assigned[1]] = [assigned[2]]
    values = {key: [_value(word) for word in words] for key, words in found.items()}
    return {key: True if not given else given[0] if len(given) == 1 else given for key, given in values.items()}


def _value(word: str) -> Any:
    if word.startswith(("{", "[")):
        try:
            return json.loads(word)
        except ValueError:
            return word
    return resolve(word)
