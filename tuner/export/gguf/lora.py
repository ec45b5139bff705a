"""A LoRA adapter by itself, as llama.cpp adds it to the model that it was trained on."""

from collections.abc import Iterator, Mapping
from typing import Any

from tuner.errors import RecipeError
from tuner.export.gguf.architecture import Architecture
from tuner.export.tensors import TensorSource, held_tensor
from tuner.model.low_rank import LowRank

KEYS = {"general.type": "adapter", "adapter.type": "lora"}


def refusals(facts: Mapping[str, Any]) -> Iterator[str]:
    """What adapters of peft, or of a run, have by these facts that a GGUF adapter cannot hold."""
    kind = str(facts.get("peft_type") or facts.get("kind") or "lora").lower()
    if kind != "lora":
        yield f"an adapter of kind {kind}"
    if facts.get("use_dora"):
        yield "DoRA's lengths"
    if facts.get("bias", "none") != "none" or facts.get("lora_bias"):
        yield "trained biases"
    if facts.get("experts") or facts.get("target_parameters"):
        yield "adapters of routed experts"
    for key in ("modules_to_save", "trainable_token_indices", "layer_replication", "fan_in_fan_out"):
        if facts.get(key):
            yield f"{key}: {facts[key]}"


def refuse(where: str, facts: Mapping[str, Any]) -> None:
    """Raise RecipeError where an adapter has what a GGUF adapter cannot hold."""
    if found := ", ".join(refusals(facts)):
        raise RecipeError(f"{where}: a GGUF adapter cannot hold {found}", hint="merge it: --adapter merge")


def adapter(
    architecture: Architecture, layers: Mapping[str, LowRank], base: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, TensorSource]]:
    """The keys and tensors of adapted weights by their published names; ``base`` are the names of the model's file.

    llama.cpp multiplies every B·A by one alpha over its rank: where ranks or scales are several, B has the rest. Raises
    RecipeError for a weight that the file of the model has not by itself.
    """
    if not layers:
        raise RecipeError("the adapter adapts no layer")
    first = next(iter(layers.values()))
    alpha = first.scale * len(first.a)
    tensors: dict[str, TensorSource] = {}
    for name, layer in layers.items():
        b = layer.b if layer.scale * len(layer.a) == alpha else layer.b * (layer.scale * len(layer.a) / alpha)
        placed = architecture.placed(name, held_tensor(b))
        target = next(iter(placed))
        if len(placed) > 1 or target not in base or target == "token_embd.weight":
            raise RecipeError(
                f"{name} is adapted: a GGUF adapter has no place for it by itself",
                hint="keep it as peft has it: tuner export-hf RUN --adapter keep",
            )
        tensors |= {f"{target}.lora_a": held_tensor(layer.a), f"{target}.lora_b": placed[target]}
    return {**KEYS, "adapter.lora.alpha": float(alpha)}, tensors
