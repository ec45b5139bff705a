"""A quantised base: which layers, what they compute, how an adapter learns on it, and how it is read."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import Glm4MoeConfig, PreTrainedModel

from tests.fixtures.hashes import frozen_hash, weights_hash
from tests.model.tiny import family_model, tiny_config
from tuner.errors import DataError, RecipeError
from tuner.model.adapter import LoraSpec, add_lora, lora_layers
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.model.flops import training_flops
from tuner.model.quantize import layers as quantizing
from tuner.model.quantize.codes import Kind, dequantize, quantize
from tuner.model.quantize.layers import QuantizeSpec, quantizable, quantize_, quantized_layers
from tuner.model.quantize.linear import QuantizedLinear

ALL = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules="all-linear")
IDS = torch.tensor([[5, 9, 3, 7, 4, 1, 8, 2]])


def published(directory: Path, kind: str = "llama-tied") -> str:
    """A directory with a tiny model's weights."""
    tiny_config(kind).save_pretrained(directory)
    model = build_model(ModelSpec(str(directory), random_init=True), torch.float32, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.save_pretrained(directory)
    return str(directory)


def model_spec(path: str | Path, spec: QuantizeSpec | None) -> ModelSpec:
    """The model of a directory, quantised while it is read."""
    return ModelSpec(str(path), quantize=spec)


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """The same with plain layers, whose weights are those that codes and scales stand for."""
    plain = copy.deepcopy(model)
    for name, layer in quantized_layers(plain).items():
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        linear.weight.data = dequantize(layer.codes, layer.scales, layer.in_features)
        linear.bias = layer.bias
        plain.set_submodule(name, linear)
    return plain


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_layer_computes_with_the_weight_that_its_codes_stand_for(kind: Kind) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(80, 24), torch.randn(2, 5, 80)
    held = quantize(linear.weight.detach(), kind)
    layer = QuantizedLinear.of(linear, linear.weight.detach(), kind)
    weight = dequantize(held.codes, held.scales, 80)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found, wanted = layer(inputs[0]), functional.linear(inputs[1], weight, linear.bias)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for each in (found, wanted):
        each.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-6, atol=1e-5)
    assert torch.equal(layer.weight, weight) and "weight" not in dict(layer.named_parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_gets_the_gradients_of_dequantised_weights(use_dora: bool) -> None:
    model = family_model("llama", tied=True)
    quantize_(model, QuantizeSpec("nf4"))
    plain = dequantised(model)
    grads, losses = [], []
    for each in (model, plain):
        add_lora(each, LoraSpec(2, 4, 0.0, "all-linear", use_dora=use_dora), seed=3)
        for _, layer in lora_layers(each):
            nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(4))
        loss = functional.cross_entropy(each(input_ids=IDS).logits[0, :-1], IDS[0, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append({name: p.grad for name, p in each.named_parameters() if p.requires_grad})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 14 * (3 if use_dora else 2)
    for name, gradient in grads[0].items():
        scale = float(grads[1][name].abs().max())
        assert float((gradient - grads[1][name]).abs().max()) <= 1e-6 * max(scale, 1.0), name


def test_a_dora_length_is_that_of_the_dequantised_row_in_float32() -> None:
    model = family_model("llama", tied=True).to(torch.bfloat16)
    quantize_(model, QuantizeSpec("nf4"))
    add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj"], use_dora=True), seed=3)
    (_, layer), *_ = lora_layers(model)
    base = layer.get_base_layer()
    length = torch.linalg.vector_norm(dequantize(base.codes, base.scales, base.in_features), dim=1)
    assert torch.equal(layer.lora_magnitude_vector["default"].weight, length)


@pytest.mark.parametrize("kind", ["llama-tied", "gemma3", "qwen3"])
def test_a_base_is_quantised_while_it_is_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, spec = published(tmp_path, kind), QuantizeSpec("nf4")
    plain, most, put = build_model(ModelSpec(path), torch.float32, seed=1), 0, quantizing.put_in_place

    def counted(model: PreTrainedModel, name: str, *rest: Any) -> None:
        nonlocal most
        layers = quantizable(model)
        most = max(most, sum(not layer.weight.is_meta for layer in layers.values()))
        put(model, name, *rest)

    monkeypatch.setattr(quantizing, "put_in_place", counted)
    model = build_model(model_spec(path, spec), torch.float32, seed=1)
    assert most == 0, "a weight that is quantised never stands in the model"
    quantize_(plain, spec)
    assert len(quantized_layers(model)) == 14
    assert weights_hash(model) == weights_hash(plain)
    assert not getattr(model, "is_quantized", False) and not hasattr(model.config, "quantization_config")
    assert "quant" not in model.config.to_json_string()
    meta = meta_model(model.config, torch.float32)
    quantize_(meta, spec)
    for each in (model, meta):
        add_lora(each, ALL, seed=3)
    shapes = [[(n, p.shape, p.dtype) for n, p in each.named_parameters()] for each in (model, meta)]
    assert shapes[0] == shapes[1]


def test_the_hash_of_the_base_is_that_of_the_unquantised_one(tmp_path: Path) -> None:
    path, hashes = published(tmp_path), []
    for spec in (None, QuantizeSpec("nf4"), QuantizeSpec("int8")):
        model = build_model(model_spec(path, spec), torch.bfloat16, seed=1)
        add_lora(model, ALL, seed=3)
        hashes.append((frozen_hash(model), weights_hash(model), training_flops(model)))
    assert len({frozen for frozen, _, _ in hashes}) == 1
    assert len({weights for _, weights, _ in hashes}) == 3
    assert hashes[0][2] == hashes[1][2] == hashes[2][2]


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = published(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(DataError, match=f"{name}: row 3 holds NaN"):
        build_model(model_spec(path, QuantizeSpec("nf4")), torch.float32, seed=1)


def test_a_missing_weight_is_named_as_without_quantising(tmp_path: Path) -> None:
    path = published(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="missing weights: model.layers.0.mlp.up_proj.weight"):
        build_model(model_spec(path, QuantizeSpec("nf4")), torch.float32, seed=1)


def test_what_is_trained_in_full_stays_as_it_is() -> None:
    model = family_model("llama", tied=False)
    spec = LoraSpec(2, 4, 0.0, "all-linear", modules_to_save=["layers.0.mlp", "lm_head"])
    quantize_(model, QuantizeSpec("nf4", spec.modules_to_save))
    add_lora(model, spec, seed=3)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad and "lora" not in name}
    assert trained == {"lm_head.weight", *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))}
    with pytest.raises(RecipeError, match="adapter.modules_to_save: 'mpl' matches nothing"):
        quantizable(family_model("llama", tied=True), ["mpl"])


def test_routers_and_stacked_experts_are_left(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "vocab_size": 32}
    model = meta_model(Glm4MoeConfig(**shape, head_dim=8, first_k_dense_replace=1), torch.float32)
    names = {name.rpartition(".")[2] for name in quantizable(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    quantize_(model, QuantizeSpec("int8"))
    said = quantizing.left_whole(model)
    assert said is not None and "2 weights stay as they are, such as model.layers.1.mlp.experts." in said
    with pytest.raises(RecipeError, match="gpt2 model has no linear layers that can be quantised"):
        quantizable(family_model("gpt2", tied=True))
