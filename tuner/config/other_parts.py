"""How what other tools say of data, layers, tokens, trackers and memory becomes ours; counts and words: other_rules."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.numbers import write_number
from tuner.config.other_data import component_name, component_settings, is_file, is_text, located, plain_sources, table
from tuner.config.other_keys import rules
from tuner.config.other_methods import is_taught
from tuner.config.other_rules import Given, Lines, listed, number, percent, switch, words
from tuner.config.other_tools import of_value, sentence, values_written
from tuner.config.yaml import package_table


def held_out(value: Any, given: Given) -> Lines | str | None:
    """A share or a count of records that are held out."""
    share = number(value)
    if share is None:
        return None
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


def loraplus(value: Any, given: Given) -> Lines | str | None:
    """LoRA+: another learning rate for the second matrix of each adapter."""
    ratio, lr = number(value), number(given.get("learning_rate"))
    if ratio is None:
        return None
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
    if found := table("builders").get(name):
        return {**found}
    if found := adamw_values().get(name):
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
    return {
        name: {"optimizer.kind": "adamw", key: value}
        for key, value in kinds.items()
        for name in values_written("optimizer.kind", f"adamw, with {key}: {value}")
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


def bits(value: Any, given: Given) -> Lines | str | None:
    """How many bits a weight of the frozen base has."""
    count = number(value)
    if count is None:
        return None
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
