"""How what other tools say of memory becomes ours: few bits, states and activations on the host, tiles, precision."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.conversion import rules
from tuner.config.not_supported import sentence
from tuner.config.other_rules import Given, Lines, number, switch, words
from tuner.config.other_tools import values_written
from tuner.config.yaml import package_table

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
