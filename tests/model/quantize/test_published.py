"""Weights that bitsandbytes stored are read to the bits that it computes with, and checkpoints that it wrote into
our codes; other formats are refused by name.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures import tables
from tests.fixtures.hashes import frozen_hash
from tests.model.quantize.drawn import blocks
from tests.model.quantize.test_layers import IDS, dequantised, model_spec
from tests.model.tiny import tiny_config
from tuner.errors import DataError, RecipeError
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import ModelSpec, build_model, model_config
from tuner.model.quantize.codes import Kind, dequantize, nf4_values, quantize
from tuner.model.quantize.layers import QuantizeSpec, quantized_layers
from tuner.model.quantize.published import dequantized_as_stored, grouped, published_kind, read

STORED = Path(__file__).with_name("stored_by_bitsandbytes.safetensors")
"""Made by bitsandbytes 0.50.2 on a CPU: `tools/quantize_campaign.py --write`; `expected.NAME` are its values."""
STATE = "quant_state.bitsandbytes__nf4"


def stored() -> dict[str, dict[str, torch.Tensor]]:
    tensors = load_file(STORED)
    weights = grouped(name for name in tensors if not name.startswith("expected."))
    return {name: {part: tensors[full] for part, full in parts.items()} for name, parts in weights.items()}


def nf4(**changes: Any) -> dict[str, torch.Tensor]:
    """The parts of a weight whose state says something else."""
    parts = stored()["plain.weight"]
    told = json.loads(bytes(parts[STATE].tolist())) | changes
    return {**parts, STATE: torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)}


@pytest.mark.parametrize("name", ["plain", "nested", "wide", "bytes", "packed"])
def test_what_is_stored_is_read_to_the_bit(name: str) -> None:
    """Plain and quantised scales, blocks of 128 in one type, int8, and codes that are stored as bfloat16."""
    parts, expected = stored()[f"{name}.weight"], load_file(STORED)[f"expected.{name}"]
    assert torch.equal(dequantized_as_stored(name, parts), expected)
    made = read(name, parts)
    assert made.scales.shape == (len(expected), -(-expected.shape[1] // 64))
    assert torch.equal(dequantize(made.codes, made.scales, made.columns, expected.dtype), expected)


def test_plain_scales_are_those_of_our_quantiser() -> None:
    made, own = read("plain", stored()["plain.weight"]), quantize(blocks(torch.bfloat16, 6, 128), "nf4")
    assert torch.equal(made.codes, own.codes) and torch.equal(made.scales, own.scales)


def test_other_names_are_no_parts() -> None:
    weights = grouped(
        ["a.weight", "a.weight.absmax", "b.weight", "c.SCB", "d.bias", "e.weight.absmax", "f.weight", "f.SCB"]
    )
    assert weights == {
        "a.weight": {"weight": "a.weight", "absmax": "a.weight.absmax"},
        "f.weight": {"weight": "f.weight", "SCB": "f.SCB"},
    }


def test_blocks_that_cross_rows_are_refused_and_still_have_their_values() -> None:
    parts, expected = nf4(shape=[8, 96]), load_file(STORED)["expected.plain"]
    assert torch.equal(dequantized_as_stored("q", parts), expected.view(8, 96))
    with pytest.raises(RecipeError, match="q: its blocks of 64 values do not lie inside its rows of 96") as raised:
        read("q", parts)
    assert "model.quantize: nf4" in str(raised.value.hint)
    parts = nf4(blocksize=32)
    parts["absmax"] = torch.ones(24)
    with pytest.raises(RecipeError, match="blocks of 32"):
        read("q", parts)


@pytest.mark.parametrize(("changes", "message"), tables.cases(__file__, "a_state_that_does_not_fit_is_refused"))
def test_a_state_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("q", nf4(**changes))


def test_damaged_parts_are_refused() -> None:
    whole = stored()
    plain, nested, rows = whole["plain.weight"], whole["nested.weight"], whole["bytes.weight"]
    damaged: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**plain, "quant_map": plain["quant_map"] * 1.01}, "quant_map is not"),
        ({**plain, "absmax": plain["absmax"] * float("nan")}, "absmax is not 12 finite"),
        ({**plain, "weight": plain["weight"][:-1]}, "383 bytes of codes"),
        ({**plain, STATE: plain[STATE][:-3]}, "not what bitsandbytes writes"),
        ({key: one for key, one in plain.items() if key != STATE}, "not what bitsandbytes writes"),
        ({key: one for key, one in nested.items() if key != "nested_absmax"}, "is missing, or too short"),
        ({**rows, "SCB": rows["SCB"][:-1]}, "its SCB of"),
        ({**rows, "SCB": rows["SCB"] * float("inf")}, "SCB is not finite"),
    ]
    for parts, message in damaged:
        with pytest.raises(DataError, match=message):
            read("layers.0.q_proj.weight", parts)
    with pytest.raises(RecipeError, match="weight_format 2"):
        read("q", {**rows, "weight_format": torch.tensor(2, dtype=torch.uint8)})
    with pytest.raises(RecipeError, match="stand for fp4"):
        read("q", {**plain, "quant_state.bitsandbytes__fp4": plain[STATE]})


@pytest.mark.parametrize(("about", "kind"), tables.cases(__file__, "the_kind_of_a_model"))
def test_the_kind_of_a_model(about: Any, kind: str | None) -> None:
    assert published_kind({"quantization_config": about}, "config.json") == kind


@pytest.mark.parametrize(("about", "message"), tables.cases(__file__, "other_formats_are_refused_by_name"))
def test_other_formats_are_refused_by_name(about: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as raised:
        published_kind({"quantization_config": about}, "m/config.json")
    assert raised.value.message.startswith("m/config.json: ") and raised.value.hint


ABOUT = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_8_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def stored_by_it(directory: Path, about: dict[str, Any] = ABOUT) -> dict[str, torch.Tensor]:
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
    tensors = stored_by_it(tmp_path, about)
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
    stored_by_it(tmp_path, IN_8_BITS)
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
    stored_by_it(tmp_path, about)
    with pytest.raises(error, match=said):
        model_config(model_spec(tmp_path, None if kind is None else QuantizeSpec(kind)))


def test_blocks_across_rows_are_refused_when_they_are_read(tmp_path: Path) -> None:
    stored_by_it(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    state = {"quant_type": "nf4", "blocksize": 128, "dtype": "float32", "shape": [128, 64]}
    tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][::2].clone()
    content = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = content
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=f"{name}: its blocks of 128 values do not lie inside its rows of 64"):
        build_model(model_spec(tmp_path, QuantizeSpec("nf4")), torch.float32, seed=1)
