"""Keys of other tools with their values, converted to ours; and those of them that depend on the keys beside them."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.eval_tasks import HARNESS
from tuner.config.numbers import write_number
from tuner.config.other_data import component_name, table
from tuner.config.other_rules import PER_DEVICE, Given, Lines, Rule, count, made, number, number_of
from tuner.config.other_rules import micro_batch as rows_of_a_process
from tuner.config.other_tools import absent_names, sentence, theirs
from tuner.config.yaml import package_table


def convert(name: str, value: Any, given: Given) -> Lines | str | None:
    """Return what to write for a key of another tool, or a note in place of that; None where neither is known.

    `given` are all keys of its configuration; `processes` among them, if there, says on how many it ran.
    """
    key = name.lower().replace("-", "_")
    rule = rules().get(key)
    value = _switched(value)
    if rule is not None:
        return rule(value, given)
    ours = theirs().get(key)
    return {ours: value} if ours is not None and not isinstance(value, Mapping) else None


def _switched(value: Any) -> Any:
    """DeepSpeed's and torchtitan's sections of a switch, `{enabled: true}`, as the switch alone."""
    if isinstance(value, Mapping):
        on = [found for key, found in value.items() if key in ("enable", "enabled") and isinstance(found, bool)]
        return on[0] if on else value
    return value


@cache
def rules() -> dict[str, Rule]:
    """How the values of other tools' keys become ours; a key that is not among them keeps its value under our name."""
    return made(package_table("other_rules")) | dict.fromkeys(PER_DEVICE, micro_batch)


@cache
def known_names() -> tuple[str, ...]:
    """Every key of another tool that can be answered, those of what is not supported included."""
    return (*dict.fromkeys([*rules(), *theirs(), *absent_names()]),)


_ALL_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_NONE = {"none", "null", "false", "full", "{}"}


def _is_set(given: Given, *names: str) -> bool:
    """Whether one of these keys has a number above 0."""
    return any((found := number(given.get(name))) is not None and found > 0 for name in names)


def _says(given: Given, name: str, *words: str) -> bool:
    return str(given.get(name)).lower() in words


def no_adapter(given: Given) -> bool:
    """Whether another key says that all weights are trained, so that nothing of an adapter counts."""
    kinds = ("finetuning_type", "train_type", "tuner_type", "sft_type")
    is_full = any(_says(given, name, "full", "freeze") for name in kinds) or _says(given, "full_finetuning", "true")
    is_off = any(str(given.get(name, True)).lower() in _NONE for name in ("use_peft", "adapter", "adapter.kind"))
    return is_full or is_off


def kind_of_adapter(given: Given) -> str:
    """The kind of the adapter whose keys are written."""
    is_dora = any(_says(given, name, "true") for name in ("use_dora", "peft_use_dora", "lora_dora"))
    return "dora" if is_dora else "lora"


def epochs(value: Any, given: Given) -> Lines | str | None:
    """Epochs, which count for nothing where a number of steps is given."""
    each = number(given.get("max_steps_per_epoch"))
    if each and each > 0:
        return steps_per_epoch(given["max_steps_per_epoch"], given)
    return {} if _is_set(given, "max_steps", "train_iters") else count(value, given, "train.duration", "epochs")


def steps_per_epoch(value: Any, given: Given) -> Lines | str | None:
    """Steps of an epoch: the run is so many for each of its epochs."""
    steps, times = number(value), next((number(given[name]) for name in ("epochs", "num_epochs") if name in given), 1)
    if steps is None or not times:
        return {} if value is None else None
    return {"train.duration": f"{write_number(steps * times)} steps"}


def warmup_share(value: Any, given: Given) -> Lines | str | None:
    """A share of the run, which counts for nothing where warm-up steps are given."""
    return {} if _is_set(given, "warmup_steps") else count(value, given, "schedule.warmup", "steps", "never")


def warmup_steps(value: Any, given: Given) -> Lines | str | None:
    """Warm-up steps; none where a share is given."""
    is_none = number(value) == 0 and _is_set(given, "warmup_ratio")
    return {} if is_none else count(value, given, "schedule.warmup", "steps", "never")


def cadence(value: Any, given: Given, key: str, strategies: str, others: str) -> Lines | str | None:
    """A count of steps, which counts for nothing where one of these strategies is another one."""
    is_other = any(_says(given, strategy, *others.split()) for strategy in strategies.split())
    return {} if is_other else count(value, given, key, "steps", "never")


def batch(value: Any, given: Given) -> Lines | str | None:
    """Rows of a step, or of a process where accumulation is said beside them."""
    is_of_a_process = "gradient_accumulation_steps" in given and not any(name in given for name in PER_DEVICE)
    found = micro_batch(value, given) if is_of_a_process else number_of(value, given, "train.global_batch_size")
    steps = number(given.get("gradient_accumulation_steps"))
    if is_of_a_process and isinstance(found, dict) and steps is not None and steps > 0:
        found |= {"train.global_batch_size": int(found["train.micro_batch_size"] * steps)}
    return found


def micro_batch(value: Any, given: Given) -> Lines | str | None:
    """Rows of a process at once, and those of a step where these cannot stay what they are."""
    found = rows_of_a_process(value, given)
    if isinstance(found, dict) and "gradient_accumulation_steps" not in given:
        rows = found["train.micro_batch_size"]
        whole = number(given.get("train.global_batch_size")) or 16
        found |= {"train.global_batch_size": rows} if whole % rows else {}
    return found


def rank(value: Any, given: Given) -> Lines | str | None:
    """The rank; in LLaMA-Factory the scale follows from it."""
    found = number_of(value, given, "adapter.r")
    if found and isinstance(found, dict) and "finetuning_type" in given and "lora_alpha" not in given:
        found |= {"adapter.alpha": 2 * found["adapter.r"]}
    return found


def _trackers(given: Given) -> list[str]:
    """Trackers that keys of their own turn on, those that are switched off left out."""
    known = table("trackers")
    off = {name for name in known if any(_says(given, key, "false") for key in (f"use_{name}", f"enable_{name}"))}
    on = (name for name, keys in known.items() if any(given.get(key) not in (None, "", False) for key in keys.split()))
    return [name for name in on if name not in off]


def tracker_project(value: Any, given: Given) -> Lines | str | None:
    """A project, which turns its tracker on; nothing where it is empty."""
    if not isinstance(value, str):
        return {} if value is None else None
    if not value.strip():
        return {}
    found = [] if "report_to" in given else _trackers(given)
    return ({"logging.trackers": found} if found else {}) | {"logging.project": value}


def use_tracker(value: Any, given: Given) -> Lines | str | None:
    """A switch of one tracker."""
    if str(value).lower() not in {"true", "false"}:
        return {} if value is None else None
    found = _trackers(given)
    return {"logging.trackers": found} if found and str(value).lower() == "true" else {}


def metric_logger(value: Any, given: Given) -> Lines | str | None:
    """torchtune's component that logs."""
    found: Lines | None = table("builders").get(component_name(value).lower())
    if found is None:
        return {} if isinstance(value, Mapping) and value else None
    project = value.get("project") if isinstance(value, Mapping) else None
    return found | ({"logging.project": project} if isinstance(project, str) else {})


def attention_modules(value: Any, given: Given) -> Lines | str | None:
    """torchtune names the layers of attention, and has a switch for those of the MLP."""
    if not isinstance(value, list):
        return None
    names = [{"output_proj": "o_proj"}.get(str(name), str(name)) for name in value]
    if given.get("model.apply_lora_to_mlp", given.get("apply_lora_to_mlp")) is True:
        names += ["gate_proj", "up_proj", "down_proj"]
    return {"adapter.target_modules": "all-linear" if set(names) == _ALL_LINEAR else names}


TRAINERS = {"sft": "sft", "dpo": "dpo", "causal": "pretrain"}
"""ArcticTraining's kinds of training; others are code of the user's own."""


def trainer(value: Any, given: Given) -> Lines | str | None:
    """ArcticTraining's `type` of a whole training; elsewhere the form of a data set's records."""
    if (word := str(value).lower()) in TRAINERS:
        return {"method.kind": TRAINERS[word]}
    if "code" in given:
        return "not supported: a trainer of your own; instead method.kind: custom, with method.use: FILE.py:NAME"
    return {"data.train.format": value} if isinstance(value, str) else None


def text_column(value: Any, given: Given) -> Lines | str | None:
    """The column of the texts, which is `text` where no other is named."""
    return {} if value == "text" else {"data.train.columns": {"text": value}} if isinstance(value, str) else None


def record_count(value: Any, given: Given) -> Lines | str | None:
    """The number of records that are taken, which belongs to a source."""
    records = number(value)
    return {"data.train.count": int(records)} if records and records > 0 and records.denominator == 1 else None


def revision(value: Any, given: Given) -> Lines | str | None:
    """A commit, tag or branch; ModelScope's default one is no branch of the hub."""
    return {} if value == "master" else {"model.revision": value} if isinstance(value, str) else None


def deepspeed(value: Any, given: Given) -> Lines | str | None:
    """DeepSpeed by its stage, where a name or a section says which; nothing of what its file says besides."""
    section = value.get("zero_optimization") if isinstance(value, Mapping) else None
    stage = section.get("stage") if isinstance(section, Mapping) else None
    word = str(value).lower().rpartition("/")[2]
    named = re.search(r"(?:zero|z|stage)[_-]?([0-3])(?!\d)", word) if isinstance(value, str) else None
    found = table("zero").get(str(stage) if stage is not None else named[1] if named else "")
    if found is None or "offload" in word:
        return sentence("deepspeed_config")
    return {**found}


def fsdp(value: Any, given: Given) -> Lines | str | None:
    """FSDP by the words that transformers takes for it."""
    words = " ".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else str(value)
    if "hybrid_shard" in words:
        return {"parallel.shard": "hybrid"}
    found = next((lines for word, lines in table("fsdp").items() if word in words.lower().split()), None)
    if found is None or "offload" in words:
        return sentence("fsdp_config")
    return {**found}


def layers_of_litgpt(value: Any, given: Given) -> Lines | str | None:
    """LitGPT's switches for the layers that get an adapter: all that are on."""
    on = [name for key, names in table("litgpt").items() if given.get(f"lora_{key}") is True for name in names]
    return {"adapter.target_modules": on} if on else None


def torchtune_loss(value: Any, given: Given) -> Lines | str | None:
    """torchtune's component of the loss: that of DPO is a method, cross-entropy is every method's."""
    if not isinstance(value, Mapping):
        return None
    name = component_name(value)
    if name == "DPOLoss":
        smoothing = {"method.label_smoothing": value["label_smoothing"]} if value.get("label_smoothing") else {}
        beta = {"method.beta": value["beta"]} if "beta" in value else {}
        return {"method.kind": "dpo"} | beta | smoothing
    is_plain = "CrossEntropy" in name or name.startswith("CE")
    return "cross-entropy is the loss of method.kind: sft and pretrain; leave it out" if is_plain else None


def lambda_of_gkd(value: Any, given: Given) -> Lines | str | None:
    """The share of answers that the student generates itself; none of them is what is here."""
    return {} if number(value) == 0 else sentence("gkd")


def harness_tasks(value: Any, given: Given) -> Lines | str | None:
    """Tasks of lm-evaluation-harness, by their names there."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    return {"eval.tasks": [f"{HARNESS}{name}" for name in names]}
