"""Files that `tuner import` refuses: those of no tool that is known, and those that say nothing of a training."""

from collections.abc import Mapping
from typing import Any

from tuner.config.conversion import known_names
from tuner.config.fields import fields
from tuner.config.other_configs import Tool, dialects
from tuner.config.other_data import table
from tuner.config.other_keys import TRAINERS
from tuner.config.other_methods import kind_of
from tuner.config.other_tools import of_value
from tuner.errors import RecipeError

_READ = (
    "files of axolotl, LLaMA-Factory, TRL, torchtune, ms-swift, Unsloth, ArcticTraining, XTuner V1 and RecIS, of "
    "OLMo-core's ladders, and shell scripts with their commands"
)
_METHOD_KEYS = ("rl", "stage", "rlhf_type", "task_type", "training_type", "trainer_type", "training.trainer_type")


def require_training(given: Mapping[str, Any], name: str, tool: Tool, is_said: bool) -> None:
    """Raise RecipeError for a file that a recipe would be made up for: not the tool's own, or of no training."""
    title = dialects()[tool].title
    tops = {key.partition(".")[0] for key in given} - {"processes", "dataset_info"}
    unknown = sorted(top for top in tops if not _is_known(top, given, tool))
    sections = [top for top in unknown if top not in given or isinstance(given[top], Mapping)]
    if tool != "torchtune" and not is_said and (len(sections) > 1 or len(unknown) * 2 > len(tops)):
        shown = ", ".join(unknown[:4])
        raise RecipeError(
            f"{name}: of no tool that is known: {shown} are no keys of {title}'s, whose others are like them",
            hint=f"read are {_READ}; if it is {title}'s all the same: --from {tool}",
        )
    last = {key.rpartition(".")[2] for key in given} | tops
    data, trains, runs = ({*names.split()} for names in table("keys").values())
    if not last & (data | trains) and last & runs:
        raise RecipeError(
            f"{name}: trains nothing: it has no data set, no learning rate and no number of steps or epochs",
            hint=f"read are {_READ}, each of a training",
        )
    if tool == "arctictraining" and given.get("type", "sft") not in TRAINERS:
        raise RecipeError(
            f"{name}: type: {given['type']}: a trainer of its own, whose code says what is trained",
            hint="write a recipe; a loss of your own is method.kind: custom with method.use: FILE.py:NAME",
        )
    if tool == "llama-factory" and not last & data and "do_train" not in last and "stage" not in last:
        raise RecipeError(f"{name}: names no data set, so it trains nothing")


def _is_known(top: str, given: Mapping[str, Any], tool: Tool) -> bool:
    """Whether a key at the top of a file may be one of the tool's, which has sections of its own or none."""
    if top not in given:
        return top in table("file_sections").get(tool, "").split()
    name, dialect = top.lower().replace("-", "_"), dialects()[tool]
    return name in known_names() or top in fields() or name in dialect.marks | dialect.rules.keys() | dialect.silent


def require_known_method(given: Mapping[str, Any], origin: str) -> None:
    """Raise RecipeError for a training of a kind that is not here: a recipe of it would be of something else."""
    for key in _METHOD_KEYS:
        word = str(given.get(key)).lower().removeprefix("trl_").removeprefix("verl_")
        if kind_of({key: given.get(key), "loss_type": given.get("loss_type")}) is not None:
            continue
        meant = of_value("method.kind", word)
        if meant is not None and meant.startswith("not supported"):
            raise RecipeError(f"{origin}: {key}: {given[key]}: {meant}")
    if any(name in given for name in ("reward_funcs", "num_generations")):
        raise RecipeError(f"{origin}: {of_value('method.kind', 'grpo')}")
    for key, value in given.items():
        if key.endswith("_component_") and ".rlhf." in str(value) and kind_of(given) is None:
            meant = of_value("method.kind", "ppo" if "PPO" in str(value) else "wpo")
            raise RecipeError(f"{origin}: {key}: {value}: {meant}")


def refuse_program(text: str, name: str) -> None:
    """Raise RecipeError for a Python program, which is never run, and of which nothing is read."""
    is_program = name.endswith((".py", ".ipynb")) or any(
        line.startswith(("import ", "from ")) and " import " in f" {line}" for line in text.splitlines()[:50]
    )
    if is_program:
        raise RecipeError(
            f"{name}: a Python program, which is not run here",
            hint="write the arguments of its trainer as YAML (learning_rate: 2e-5, dataset_name: OWNER/NAME, ...) and "
            "import that: tuner import args.yaml --from trl; read are also shell scripts with a training command",
        )
