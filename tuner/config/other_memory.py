"""How what other tools say of memory becomes ours: few bits, states and activations on the host, tiles, precision."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.config.not_supported import sentence
from tuner.config.other_rules import Given, Lines, Rule, bound, dtype, number, switch, words
from tuner.config.other_tools import by_name, values_written

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
    adamw = ["adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "torch.optim.adamw", "adam"]
    others = {"adafactor": "adafactor", "muon": "muon", "sgd": {"optimizer.kind": "sgd", "optimizer.momentum": 0}}
    return words(value, given, "optimizer.kind", dict.fromkeys(adamw, "adamw") | others | adamw_values())


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


def _way(value: Any, given: Given, *known: str) -> Lines | str | None:
    """How the bits are made of the weights, which has no key here."""
    if str(value).lower() not in known:
        return sentence("gptq")
    return {} if _is_quantised(given) else "model.quantize: nf4 or int8 gives bitsandbytes' codes; leave it out"


def _host(value: Any, given: Given, key: str) -> Lines | str | None:
    """A truth value, the word of a device, or DeepSpeed's section of one."""
    device = str(value.get("device", "none") if isinstance(value, Mapping) else value).lower()
    if device in _HOSTS:
        return {key: "host"}
    return sentence("nvme_path") if device == "nvme" else switch(value, given, key, "host", "none")


def _activations(value: Any, given: Given) -> Lines | str | None:
    """Activations on the host; on a disk they cannot be."""
    if str(value).lower() in {"disk", "offload_disk"}:
        return sentence("nvme_path")
    found = switch(value in ("legacy", "hidden_states") or value, given, "train.offload_activations", True)
    return found | {"train.gradient_checkpointing": "full"} if isinstance(found, dict) else found


def _four_bits(value: Any, given: Given) -> Lines | str | None:
    """A base of 4 bits, where its codes are those that are here."""
    if str(value).lower() == "true" and str(given.get("bnb_4bit_quant_type", "nf4")).lower() != "nf4":
        return sentence("gptq")
    return switch(value, given, "model.quantize", "nf4")


def _qlora(value: Any, given: Given) -> Lines | str | None:
    """oumi's switch, with the bits and their codes beside it."""
    found = _four_bits(value, given)
    return bits(given.get("q_lora_bits", 4), given) if found == {"model.quantize": "nf4"} else found


def _whole(value: Any, given: Given) -> Lines | str | None:
    """A section of transformers on how a model is quantised."""
    if not isinstance(value, Mapping):
        return None
    found: Lines = {}
    for key, rule in _BITS.items():
        lines = rule(value[key], value) if key in value else None
        if isinstance(lines, str) and lines.startswith("not supported"):
            return lines
        found |= lines if isinstance(lines, dict) else {}
    return found or sentence("gptq")


_BITS: dict[str, Rule] = {
    "load_in_4bit": _four_bits, "load_in_8bit": bound(switch, "model.quantize", "int8"), "bits": bits,
    "bnb_4bit_compute_dtype": dtype,
}  # fmt: skip
"""Keys of transformers' section on how a model is quantised."""
RULES: dict[str, Rule] = by_name({
    "optim": optimizer,
    "load_in_4bit qlora quantize_base": _four_bits,
    "q_lora": _qlora,
    "quantization_bit quant_bits bits": bits,
    "quantization_config bnb_config_kwargs": _whole,
    "quantization_method quant_method": bound(_way, "bnb", "bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit"),
    "bnb_4bit_quant_type quantization_type": bound(_way, "nf4"),
    "cpu_offload offload_params fsdp_offload_params fsdp_cpu_offload offload_param offload_param_device":
        bound(_host, "parallel.offload"),
    "offload_optimizer zero_offload optimizer_cpu_offload optim_cpu_offload offload_optimizer_device":
        bound(_host, "optimizer.offload"),
    "activation_offloading enable_activation_offloading offload_activations gradient_checkpointing_offload "
    "activation_cpu_offload cpu_offloading activation_checkpointing_offload "
    "activation_checkpoint_cpu_offload": _activations,
})
