"""Whole configurations of other tools: whose one is, what a tool takes where nothing is written, and its own words."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

from tuner.config.not_supported import sentence
from tuner.config.other_data import component_name, located, registered
from tuner.config.other_keys import metric_logger
from tuner.config.other_memory import adapter
from tuner.config.other_parts import sets_of
from tuner.config.other_rules import Given, Lines, Rule, listed, made, number
from tuner.config.other_tools import of_value
from tuner.config.yaml import package_table

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
            title=row["title"],
            marks=frozenset(row["marks"].split()),
            defaults=row["defaults"],
            defaults_of=row.get("defaults_of", {}),
            rules=made(row["rules"]),
            silent=frozenset(row["silent"].split()),
        )
        for tool, row in package_table("other_configs").items()
    }


def detect(keys: frozenset[str]) -> Tool | None:
    """The tool whose marks most of the keys are; None where none of them is any tool's."""
    scores = {tool: len(keys & dialect.marks) for tool, dialect in dialects().items()}
    best = max(scores, key=lambda tool: (scores[tool], tool != "trl"))  # whose keys others have, too
    if "_component_" in keys:
        return "torchtune"
    return best if scores[best] else None
