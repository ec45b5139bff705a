"""Mixtures of experts there and back: published files, the model that is trained, and files of each expert again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.export.runs import LORA, PROMPTS, write_run, write_tokenizer
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.checkpoint.open import open_checkpoint
from tuner.export.verify import last_logits
from tuner.model.adapter import ADAPTER, LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model

FUSED = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "down_proj": ("down_proj", "w2")}
"""The stacked tensors of transformers 5, and the names of the parts of an expert in published files."""


def write_mixture(config: PretrainedConfig, directory: Path) -> Path:
    """A model of the config with a tokenizer, whose every tensor has values of its own, buffers too."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def trained_model(run: Path, base: Path, lora: LoraSpec | None) -> PreTrainedModel:
    """The model of a run, with its adapter, in float32."""
    model = build_model(ModelSpec(str(base)), torch.float32, seed=0)
    if lora is not None:
        add_lora(model, lora, seed=0)
    there: dict[str, torch.Tensor] = dict(model.named_parameters())
    names = [f"model/{name}" for name, parameter in there.items() if parameter.requires_grad]
    checkpoint = open_checkpoint(run / "checkpoints" / "step-7")
    with torch.no_grad():
        for key, tensor in read_tensors(checkpoint, sorted(names)):
            there[key.removeprefix("model/")].copy_(tensor)
    return model.eval()


@torch.no_grad()
def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Every tensor of the plain model, adapters added to their weights: W + s·B·A in float32."""
    state = {name.replace(".base_layer.", "."): tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            delta = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight * layer.scaling[ADAPTER]
            state[f"{name}.weight"] += delta.T if layer.fan_in_fan_out else delta
    return state


def experts_of(tensors: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> Iterator[tuple[str, bool]]:
    """Each published tensor of one expert, and whether it is that expert's part of the model's stacked ones.

    By its place in the name and in the stack alone: no mapping of transformers is asked.
    """
    stacks = {name: tensor for name, tensor in state.items() if re.search(r"\.experts\.(gate_up|down)_proj$", name)}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.(\d+)\..*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            continue
        layer, expert, part = int(found[2]), int(found[3]), found[4]
        fused = next(key for key, parts in FUSED.items() if part in parts)
        (stack,) = (t for n, t in stacks.items() if f".{layer}." in n and n.endswith(fused))
        mine = stack[expert]
        if fused == "gate_up_proj":
            half = len(mine) // 2
            mine = mine[:half] if part in ("gate_proj", "w1") else mine[half:]
        yield name, torch.equal(tensor, mine)


def round_trip(config: PretrainedConfig, place: Path, per_expert: bool) -> dict[str, Any]:
    """Train a model of the config a little, in full and with an adapter, export it, and compare: what was found.

    ``per_expert`` says whether its published files hold each expert by itself. Raises AssertionError.
    """
    base = write_mixture(config, place / "base")
    published = load_file(base / "model.safetensors")
    figures: dict[str, Any] = {"tensors": len(published)}
    for name, lora in (("full", None), ("lora", LORA)):
        run = write_run(place / name, base, lora, amount=0.05 if lora is None else 0.2)
        trained = trained_model(run, base, lora)
        state = merged_state(trained)
        for dtype in ("fp32", "bf16") if lora is None else ("fp32",):
            report = export_hf(run, place / f"{name}-{dtype}", dtype=dtype)
            tensors = load_file(report.path / "model.safetensors")
            assert tensors.keys() == published.keys(), set(tensors) ^ set(published)
            kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
            rounded = {key: t.to(kept) if t.is_floating_point() else t for key, t in state.items()}
            found = dict(experts_of(tensors, rounded))
            assert bool(found) == per_expert
            assert all(found.values()), [key for key, same in found.items() if not same][:3]
            figures[f"{name}-{dtype}"] = len(found)
            loaded: Any = AutoModelForCausalLM.from_pretrained(report.path, dtype=kept)
            for key, tensor in loaded.state_dict().items():
                exact = state[key].to(tensor.dtype)  # float32 where the class keeps it so
                rounded_first = state[key].to(kept).to(tensor.dtype) if "correction" not in key else exact
                assert torch.equal(tensor, exact) or torch.equal(tensor, rounded_first), key
            if dtype == "fp32":
                off = (last_logits(loaded.eval(), PROMPTS) - last_logits(trained, PROMPTS)).abs().max()
                assert off <= (0.0 if lora is None else 1e-3), float(off)
        if lora is not None:
            kept_report = export_hf(run, place / "kept", adapter="keep", dtype="fp32")
            figures["kept"] = float(kept_report.max_difference or 0.0)
            assert figures["kept"] <= 1e-4
    return figures
