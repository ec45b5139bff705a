"""Keys of other tools with their values, converted to ours: those of which the meaning needs code, as it depends on the
keys beside them, or on what a section, a list or a component of another tool holds. Counts and words: other_rules.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from tuner.config import other_rules
from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.eval_tasks import HARNESS
from tuner.config.numbers import write_number
from tuner.config.other_data import component_name, component_settings, is_file, is_text, located, plain_sources, table
from tuner.config.other_methods import is_taught
from tuner.config.other_rules import Given, Lines, Rule, count, listed, made, number, number_of, percent, switch, words
from tuner.config.other_tools import absent_names, of_value, sentence, theirs
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
    items = value.items() if isinstance(value, Mapping) else ()
    return next((on for key, on in items if key in ("enable", "enabled") and isinstance(on, bool)), value)


@cache
def rules() -> dict[str, Rule]:
    """How the values of other tools' keys become ours; a key that is not among them keeps its value under our name."""
    return made(package_table("other_rules")) | dict.fromkeys(other_rules.PER_DEVICE, micro_batch)


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
    steps = number(given.get(accumulated := "gradient_accumulation_steps"))
    is_of_a_process = accumulated in given and not any(name in given for name in other_rules.PER_DEVICE)
    found = micro_batch(value, given) if is_of_a_process else number_of(value, given, "train.global_batch_size")
    if is_of_a_process and isinstance(found, dict) and steps is not None and steps > 0:
        found |= {"train.global_batch_size": int(found["train.micro_batch_size"] * steps)}
    return found


def micro_batch(value: Any, given: Given) -> Lines | str | None:
    """Rows of a process at once, and those of a step where these cannot stay what they are."""
    found = other_rules.micro_batch(value, given)
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
    names = ["o_proj" if name == "output_proj" else str(name) for name in value]
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


@other_rules.of_number
def record_count(records: Fraction, given: Given) -> Lines | str | None:
    """The number of records that are taken, which belongs to a source."""
    return {"data.train.count": int(records)} if records > 0 and records.denominator == 1 else None


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
    return sentence("deepspeed_config") if found is None or "offload" in word else {**found}


def fsdp(value: Any, given: Given) -> Lines | str | None:
    """FSDP by the words that transformers takes for it."""
    words = " ".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else str(value)
    if "hybrid_shard" in words:
        return {"parallel.shard": "hybrid"}
    found = next((lines for word, lines in table("fsdp").items() if word in words.lower().split()), None)
    return sentence("fsdp_config") if found is None or "offload" in words else {**found}


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


@other_rules.of_number
def held_out(share: Fraction, given: Given) -> Lines | str | None:
    """A share or a count of records that are held out."""
    if share == 0:
        return "0 is the default of data.eval; leave it out"
    return {"data.eval": percent(share) if share < 1 else f"{write_number(share)} documents"}


def data_set(value: Any, given: Given) -> Lines | str | None:
    """A hub name with the split that another key names, or the path of a file."""
    if not isinstance(value, str) or not value.strip():
        return None
    return {"data.train": located(value, given.get("dataset_train_split") or given.get("train_split"))}


def targets(value: Any, given: Given) -> Lines | str | None:
    """Names in a list or separated by commas, or a word for all linear layers."""
    if isinstance(value, str) and set(value) & set("\\()|^$+"):
        return "not supported: layers by a regular expression; instead adapter.target_modules with names or globs"
    names = listed(value)
    is_all = value is True or [name.lower() for name in names] in (["all"], ["all-linear"], ["all_linear"], ["auto"])
    return {"adapter.target_modules": "all-linear" if is_all else names} if is_all or names else None


_EXPERTS = {"gate_up_proj", "up_proj", "down_proj"}


def experts(value: Any, given: Given) -> Lines | str | None:
    """Names of the weights of routed experts, of which a recipe adapts both, in all layers."""
    names = listed(value)
    ends = {name.rpartition(".")[2] for name in names}
    if not ends or not ends <= _EXPERTS or not all("experts" in name for name in names):
        return None
    if "down_proj" not in ends or len(ends) == 1 or any(part.isdigit() for name in names for part in name.split(".")):
        return "adapter.experts: true adapts both weights of the routed experts of all layers"
    return {"adapter.experts": True}


def trackers(value: Any, given: Given) -> Lines | str | None:
    """Those of the trackers that are here, too."""
    wanted = [value] if isinstance(value, str) else value
    if not isinstance(wanted, list):
        return None
    known = [item for item in wanted if item in ("wandb", "tensorboard", "mlflow")]
    if known or wanted in (["none"], []):
        return {"logging.trackers": known}
    return of_value("logging.trackers", str(wanted[0]))


def new_tokens(value: Any, given: Given) -> Lines | str | None:
    """Texts that become tokens."""
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, Mapping):
        return (
            "special tokens come with the tokenizer; new ones are tokenizer.add_tokens: [{token: TEXT, special: true}]"
        )
    if not isinstance(items, list) or not items:
        return None
    return {"tokenizer.add_tokens": [str(item) for item in items]}


def adapters(value: Any, given: Given) -> Lines | str | None:
    """Directories of adapters, in a list or separated by commas, to be trained further or to lie below a new one."""
    paths = listed(value)
    if not paths or not all(isinstance(item, str) for item in value):
        return None
    how = {"adapter": "merge"} if given.get("create_new_adapter") is True else {}
    merged = [{"path": path, "adapter": "merge"} for path in paths[:-1]]
    return {"model.init_from": [*merged, {"path": paths[-1], **how}]}


def plugins(value: Any, given: Given) -> Lines | str | None:
    """Plug-ins of axolotl, of which Liger's is the model's kernels here."""
    named = value if isinstance(value, list) else [value]
    if named and all("liger" in str(item).lower() for item in named):
        return {"model.kernels": "liger"}
    return "code of your own is an item of hooks here, FILE.py:NAME; another tool's plug-ins are not loaded"


_TEMPLATES = {"cohere": "command-r", "phi_3": "phi3", "phi_4": "phi4", "qwen_25": "qwen"}
"""Other tools' names of chat templates that have another name here."""


def chat_template(value: Any, given: Given) -> Lines | str | None:
    """A template by its name, where there is one of that name here; the tokenizer's own needs no key."""
    word = str(value).lower()
    if word == "tokenizer_default" or value is None:
        return {}
    if word.endswith((".jinja", ".jinja2", ".j2")):
        return {"tokenizer.chat_template": value}
    found = _TEMPLATES.get(word, word)
    if found in CHAT_TEMPLATES:
        return {"tokenizer.chat_template": found}
    fallback = _TEMPLATES.get(last := word.removeprefix("tokenizer_default_fallback_"), last)
    if fallback in CHAT_TEMPLATES:
        return f"the tokenizer's own template is used; where it has none, write tokenizer.chat_template: {fallback}"
    if word == "jinja" or "{%" in word or "{{" in word:
        return "write the template to a file, and tokenizer.chat_template: FILE.jinja"
    return (
        "no chat template has this name here, so the tokenizer's own is used; instead tokenizer.chat_template: "
        f"FILE.jinja, or one of {', '.join(CHAT_TEMPLATES)}"
    )


@other_rules.of_number
def loraplus(ratio: Fraction, given: Given) -> Lines | str | None:
    """LoRA+: another learning rate for the second matrix of each adapter."""
    lr = number(given.get("learning_rate"))
    if not lr or not ratio:
        return (
            "not supported: a ratio of learning rates (LoRA+); instead optimizer.groups: [{match: '*lora_B*', lr: N}]"
        )
    return {"optimizer.groups": [{"match": "*lora_B*", "lr": float(f"{float(ratio * lr):g}")}]}


def roles(value: Any, given: Given) -> Lines | str | None:
    """Axolotl's list of roles that are trained."""
    if isinstance(value, list) and value and all(role in ("assistant", "gpt") for role in value):
        return {"method.train_on": "assistant"}
    return "not supported: a choice of roles; instead method.train_on: assistant, last_assistant or all"


def data_sets(value: Any, given: Given) -> Lines | str | None:
    """Data sets under any of the names that other tools have for them."""
    sources = plain_sources(value)
    names = value.replace(",", " ").split() if isinstance(value, str) else []
    if any("/" not in name and "#" not in name and not is_file(name) for name in names):
        return (
            "its names stand in LLaMA-Factory's dataset_info.json; here the files themselves do, "
            "data.train: [FILE, ...]"
        )
    if sources is None:
        return None
    settings = component_settings(value) if isinstance(value, Mapping) and "_component_" in value else {}
    kind = "method.rows" if is_taught(given) else "method.kind"
    return {"data.train": sources} | settings | ({kind: "pretrain"} if is_text(sources) else {})


def sets_of(value: Any, given: Given, key: str) -> Lines | str | None:
    """Data sets under a key of ours."""
    sources = plain_sources(value)
    return None if sources is None else {key: sources}


def builder(value: Any, given: Given) -> Lines | str | None:
    """What torchtune builds by a dotted path."""
    name = component_name(value).lower()
    if found := table("builders").get(name) or adamw_values().get(name):
        return {**found}
    if "8bit" in name or "4bit" in name:
        return of_value("optimizer.kind", "lion_8bit")
    if found := adapter(name.partition("_")[0]):
        return found
    return "components are chosen by kind here; tuner import FILE converts a file of torchtune"


_HOSTS = {"cpu", "host", "true", "pin_memory"}


@cache
def adamw_values() -> dict[str, Lines]:
    """Names of AdamW whose states have 8 bits, or lie in the host's memory."""
    kinds = {"optimizer.state": "8bit", "optimizer.offload": "host"}
    written = package_table("other_tools")["write"]["optimizer.kind"]
    return {
        name: {"optimizer.kind": "adamw", key: value}
        for key, value in kinds.items()
        for name in str(written[f"adamw, with {key}: {value}"]).split()
    }


def optimizer(value: Any, given: Given) -> Lines | str | None:
    """The optimizer by transformers' names."""
    return words(value, given, "optimizer.kind", package_table("other_data")["optimizers"] | adamw_values())


def adapter(value: Any) -> Lines | None:
    """A kind of adapter by other tools' names, of which some say that its base has 4 bits; None for no such kind."""
    kind = str(value).lower()
    found = {"adapter.kind": kind.removeprefix("q")}
    if kind in {"qlora", "qdora"}:
        return found | {"model.quantize": "nf4"}
    return found if kind in {"lora", "dora"} else None


@other_rules.of_number
def bits(count: Fraction, given: Given) -> Lines | str | None:
    """How many bits a weight of the frozen base has."""
    if count in {16, 32}:
        return "0 is the default of model.quantize; leave it out"
    ours = {4: "nf4", 8: "int8"}.get(int(count))
    ways = (str(given.get(name, "")).lower() for name in ("quant_method", "quantization_method"))
    is_other = any(way in {"gptq", "awq", "aqlm", "hqq", "eetq", "quanto"} for way in ways)
    return sentence("gptq") if ours is None or is_other else {"model.quantize": ours}


def _is_quantised(given: Given) -> bool:
    """Whether another key says that the base has few bits."""
    words = (str(given.get(key, "")).lower() for key in ("adapter", "finetuning_type", "training_type"))
    on = (str(given.get(key, "")).lower() for key in ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits"))
    return any("qlora" in word for word in words) or any(word in {"true", "4", "8"} for word in on)


def way(value: Any, given: Given, *known: str) -> Lines | str | None:
    """How the bits are made of the weights, which has no key here."""
    if str(value).lower() not in known:
        return sentence("gptq")
    return {} if _is_quantised(given) else "model.quantize: nf4 or int8 gives bitsandbytes' codes; leave it out"


def host(value: Any, given: Given, key: str) -> Lines | str | None:
    """A truth value, the word of a device, or DeepSpeed's section of one."""
    device = str(value.get("device", "none") if isinstance(value, Mapping) else value).lower()
    if device in _HOSTS:
        return {key: "host"}
    return sentence("nvme_path") if device == "nvme" else switch(value, given, key, "host", "none")


def activations(value: Any, given: Given) -> Lines | str | None:
    """Activations on the host; on a disk they cannot be."""
    if str(value).lower() in {"disk", "offload_disk"}:
        return sentence("nvme_path")
    found = switch(value in ("legacy", "hidden_states") or value, given, "train.offload_activations", True)
    return found | {"train.gradient_checkpointing": "full"} if isinstance(found, dict) else found


def four_bits(value: Any, given: Given) -> Lines | str | None:
    """A base of 4 bits, where its codes are those that are here."""
    if str(value).lower() == "true" and str(given.get("bnb_4bit_quant_type", "nf4")).lower() != "nf4":
        return sentence("gptq")
    return switch(value, given, "model.quantize", "nf4")


def qlora(value: Any, given: Given) -> Lines | str | None:
    """oumi's switch, with the bits and their codes beside it."""
    found = four_bits(value, given)
    return bits(given.get("q_lora_bits", 4), given) if found == {"model.quantize": "nf4"} else found


def quantized(value: Any, given: Given) -> Lines | str | None:
    """A section of transformers on how a model is quantised."""
    if not isinstance(value, Mapping):
        return None
    found: Lines = {}
    for key in ("load_in_4bit", "load_in_8bit", "bits", "bnb_4bit_compute_dtype"):
        lines = rules()[key](value[key], value) if key in value else None
        if isinstance(lines, str) and lines.startswith("not supported"):
            return lines
        found |= lines if isinstance(lines, dict) else {}
    return found or sentence("gptq")
