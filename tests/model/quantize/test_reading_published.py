"""Checkpoints that bitsandbytes wrote, read into our codes; others refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.quantize.test_layers import IDS, dequantised, model_spec
from tests.model.tiny import tiny_config
from tuner.errors import DataError, RecipeError
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model, model_config
from tuner.model.freeze import frozen_hash
from tuner.model.quantize.codes import Kind, nf4_values, quantize
from tuner.model.quantize.layers import QuantizeSpec, quantized_layers

ABOUT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_8_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def stored(directory: Path, about: dict[str, Any] = ABOUT) -> dict[str, torch.Tensor]:
    """Have a directory hold what bitsandbytes would write of a model, whose rows are of 64 numbers; the weights."""
    config = tiny_config("llama-tied")
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    config.save_pretrained(directory)
    build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=1).save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, "quantization_config": about}))
    tensors = load_file(directory / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        found |= _parts(name, weight, about) if name.endswith("_proj.weight") else {name: weight}
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    return tensors


def _parts(name: str, weight: torch.Tensor, about: dict[str, Any]) -> dict[str, torch.Tensor]:
    if about == IN_8_BITS:  # one scale for each row
        scales = weight.abs().amax(1)
        codes = torch.round(weight * (127.0 / scales)[:, None]).to(torch.int8)
        return {name: codes, name.removesuffix("weight") + "SCB": scales}
    held = quantize(weight, "nf4")
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    return {
        name: held.codes.reshape(-1, 1),
        f"{name}.absmax": held.scales.flatten(),
        f"{name}.quant_map": nf4_values(torch.device("cpu")).clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


@pytest.mark.parametrize(("about", "kind"), [(ABOUT, "nf4"), (IN_8_BITS, "int8")])
def test_stored_codes_are_read_as_they_are(about: dict[str, Any], kind: Kind, tmp_path: Path) -> None:
    tensors = stored(tmp_path, about)
    spec = model_spec(tmp_path, QuantizeSpec(kind))
    model = build_model(spec, torch.float32, seed=1)
    assert len(quantized_layers(model)) == 14
    for name, layer in quantized_layers(model).items():
        parts = _parts(f"{name}.weight", tensors[f"{name}.weight"], about)
        assert torch.equal(layer.codes.view(torch.uint8).flatten(), parts[f"{name}.weight"].view(torch.uint8).flatten())
        if kind == "int8":
            assert torch.equal(layer.scales[:, 0], parts[f"{name}.SCB"])
        else:
            assert torch.equal(layer.scales.flatten(), parts[f"{name}.weight.absmax"])
    assert "quant" not in model.config.to_json_string() + model_config(spec).to_json_string()
    torch.testing.assert_close(model(input_ids=IDS).logits, dequantised(model)(input_ids=IDS).logits)
    add_lora(model, LoraSpec(2, 4, 0.0, "all-linear"), seed=3)
    base = frozen_hash(model)
    model.get_submodule("model.layers.0.mlp.up_proj").get_base_layer().scales.data[0] *= 2
    assert frozen_hash(model) != base, "the codes themselves are the base"


def test_a_layer_that_is_trained_in_full_is_turned_back(tmp_path: Path) -> None:
    stored(tmp_path, IN_8_BITS)
    kept = QuantizeSpec("int8", ["layers.0.mlp.up_proj"])
    model = build_model(model_spec(tmp_path, kept), torch.float32, seed=1)
    whole = build_model(model_spec(tmp_path, QuantizeSpec("int8")), torch.float32, seed=1)
    name = "model.layers.0.mlp.up_proj"
    assert len(quantized_layers(model)) == 13
    assert torch.equal(model.get_submodule(name).weight, quantized_layers(whole)[name].weight)


@pytest.mark.parametrize(
    ("about", "kind", "error", "said"),
    [
        (ABOUT, None, DataError, "the weights are quantised"),
        (ABOUT, "int8", RecipeError, "model.quantize: int8, but the weights of .* are published as nf4"),
        ({"quant_method": "gptq", "bits": 4}, "nf4", RecipeError, "quantised by gptq, which is not read"),
        ({**ABOUT, "bnb_4bit_quant_type": "fp4"}, "nf4", RecipeError, "stand for fp4, not nf4"),
    ],
)
def test_what_cannot_be_read_is_refused(
    about: dict[str, Any], kind: Any, error: type[Exception], said: str, tmp_path: Path
) -> None:
    stored(tmp_path, about)
    with pytest.raises(error, match=said):
        model_config(model_spec(tmp_path, None if kind is None else QuantizeSpec(kind)))


def test_blocks_across_rows_are_refused_when_they_are_read(tmp_path: Path) -> None:
    stored(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state = {"quant_type": "nf4", "blocksize": 128, "dtype": "float32", "shape": [128, 64]}
    tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][::2].clone()
    content = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = content
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=f"{name}: its blocks of 128 values do not lie inside its rows of 64"):
        build_model(model_spec(tmp_path, QuantizeSpec("nf4")), torch.float32, seed=1)
