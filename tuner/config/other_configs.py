"""Whole configurations of other tools, training commands in scripts among them: what they say by dotted key, and whose
they are; what a tool takes where nothing is written, and its own words.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any, Literal, get_args

from tuner.config.other_data import component_name, located, registered
from tuner.config.other_keys import adapter, metric_logger, sets_of
from tuner.config.other_rules import Given, Lines, Rule, listed, made, number
from tuner.config.other_tools import absent, of_value, sentence
from tuner.config.yaml import package_table, resolve
from tuner.errors import RecipeError

Tool = Literal[
    "axolotl", "llama-factory", "trl", "torchtune", "ms-swift", "unsloth", "arctictraining", "xtuner", "olmo-core",
    "recis",
]
TOOLS: tuple[Tool, ...] = get_args(Tool)


@dataclass(frozen=True)
class Dialect:
    """One tool: keys that only it has, its defaults in our words where they differ from ours, and its own meanings."""

    title: str
    marks: frozenset[str]
    defaults: Lines
    defaults_of: Mapping[str, Lines]
    """The same by the kind of a preference training: TRL's CPO adds a supervised term to SimPO with weight 1."""
    rules: Mapping[str, Rule]
    silent: frozenset[str]
    """Keys that say nothing about the training."""

    def defaults_with(self, method: str | None, given: Given) -> Lines:
        """The defaults of a kind of training; what is written in its configuration comes on top."""
        of_method = dict(self.defaults_of.get(method or "", {}))
        if number(given.get("cpo_alpha")) == 0:
            of_method.pop("method.sft_weight", None)
        return self.defaults | of_method


def one_label(value: Any, given: Given) -> Lines | str | None:
    """A reward model's head has one score."""
    return {} if value == 1 and given.get("reward_model") is True else sentence("num_labels")


def axolotl_adapter(value: Any, given: Given) -> Lines | str | None:
    """axolotl's word for an adapter, of which some say that its base has 4 bits."""
    return adapter(value) or of_value("adapter.kind", value)


def registered_sets(value: Any, given: Given) -> Lines | str | None:
    """LLaMA-Factory's names of data sets, looked up in `dataset_info.json` where it was read."""
    info, directory = given.get("dataset_info"), str(given.get("dataset_dir") or "data")
    listing = info if isinstance(info, Mapping) else {}
    found: list[Any] = [registered(name, listing, directory) for name in listed(value)]
    if counted := number(given.get("max_samples")):
        found = [{**({"path": item} if isinstance(item, str) else item), "count": int(counted)} for item in found]
    return {"data.train": found}


def registered_held_out(value: Any, given: Given) -> Lines | str | None:
    """The same of the data sets that are held out."""
    found = registered_sets(value, {**given, "max_samples": None})
    return {"data.eval": found["data.train"]} if isinstance(found, dict) else found


def tuner_model(value: Any, given: Given) -> Lines | str | None:
    """A builder of torchtune's models: which adapter it has."""
    found = adapter(component_name(value).partition("_")[0])
    if found is None:
        return {"adapter.kind": "none"}
    return found | ({"adapter.kind": "dora"} if given.get("model.use_dora") is True else {})


def swift_sets(value: Any, given: Given, key: str) -> Lines | str | None:
    """Data sets between spaces."""
    return sets_of(value.split() if isinstance(value, str) else value, given, key)


def tuner_kind(value: Any, given: Given) -> Lines | str | None:
    """Unsloth's kind of training: an adapter, or all weights."""
    kind = "qlora" if "qlora" in str(value).lower() else "lora"
    return adapter(kind) if "lora" in str(value).lower() else {"adapter.kind": "none"}


def logger(value: Any, given: Given) -> Lines | str | None:
    """torchtune's component that logs, by its path alone."""
    return metric_logger({"_component_": value, "project": given.get("metric_logger.project")}, given)


def smoothing(value: Any, given: Given) -> Lines | str | None:
    """torchtune's smoothing of the loss."""
    return {"method.label_smoothing": value} if value else {}


def held_out_split(value: Any, given: Given) -> Lines | str | None:
    """TRL's split of the data set that is held out, where it evaluates at all."""
    name = given.get("dataset_name")
    if not isinstance(name, str) or str(given.get("eval_strategy", "no")).lower() in {"no", "false"}:
        return {}
    return {"data.eval": [located(name, value)]}


@cache
def dialects() -> dict[Tool, Dialect]:
    """Every tool whose configurations are read."""
    return {
        tool: Dialect(
            title=row["title"], marks=frozenset(row["marks"].split()), defaults=row["defaults"],
            defaults_of=row.get("defaults_of", {}), rules=made(row["rules"]), silent=frozenset(row["silent"].split()),
        )
        for tool, row in package_table("other_configs").items()
    }


def detect(keys: frozenset[str]) -> Tool | None:
    """The tool whose marks most of the keys are; None where none of them is any tool's."""
    scores = {tool: len(keys & dialect.marks) for tool, dialect in dialects().items()}
    best = max(scores, key=lambda tool: (scores[tool], tool != "trl"))  # whose keys others have, too
    return "torchtune" if "_component_" in keys else best if scores[best] else None


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
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():  # continued ones are joined
        try:
            words = shlex.split(_expanded(line, variables), comments=True)
        except ValueError:  # a quote that is not closed: no line of a command
            continue
        for command in [list(group) for joins, group in groupby(words, _OPERATORS.__contains__) if not joins]:
            while command and (set_here := _VARIABLE.fullmatch(command[0])):
                variables[set_here[1]] = set_here[2]
                del command[0]
            if command[:1] == ["export"]:
                variables |= {found[1]: found[2] for word in command[1:] if (found := _VARIABLE.fullmatch(word))}
            elif _is_training(command):
                return command, variables
    return None


def _expanded(line: str, variables: dict[str, str]) -> str:
    """A line with the variables that are known in place of their names; `${NAME:-x}` is x where none is set."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, line)


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
    rest = list(dropwhile({"nohup", "srun", "time", "exec", "uv", "run", "env", "sudo"}.__contains__, words))
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
