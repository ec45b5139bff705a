"""Adapters: what is trained, in which type, and from which seed; and their product, which is added inside the matrix
product: peft's numbers, without its passes over the result.
"""

import dataclasses
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import Glm4MoeConfig, PreTrainedModel

from tests.fixtures.hashes import frozen_hash
from tests.fixtures.packed import drawn_root, packed_inputs, random_ids
from tests.fixtures.tensors import Operations
from tests.model.tiny import family_config, family_model, tiny_config
from tuner.errors import RecipeError
from tuner.model import adapter
from tuner.model import adapter as adapter_module
from tuner.model.adaptable import add_in_product, takes_product
from tuner.model.adapter import (
    ADAPTER,
    LoraSpec,
    adapter_off,
    add_lora,
    left_out_experts,
    lora_layers,
    taken_for_experts,
    tied_layers,
)
from tuner.model.build import meta_model
from tuner.model.freeze import freeze
from tuner.model.probe import require_isolation
from tuner.model.root import CausalLM, trained_parameters

SPEC = LoraSpec(r=2, alpha=4, dropout=0.0, target_modules=["q_proj", "v_proj"])


def adapted(directory: Path, kind: str, spec: LoraSpec = SPEC, dtype: torch.dtype = torch.float32) -> CausalLM:
    root = drawn_root(tiny_config(kind), directory, dtype=dtype)
    add_lora(root.model, spec, seed=3)
    return root


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_exactly_the_adapter_is_trained(kind: str, tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.self_attn.{module}.lora_{part}.default.weight"
        for layer in range(2) for module in ("q_proj", "v_proj") for part in "AB"
    ]
    assert sorted(trained_parameters(adapted(tmp_path, kind))) == sorted(names)


def test_the_adapter_is_float32_on_a_bfloat16_base(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", dtype=torch.bfloat16)
    trained = trained_parameters(root)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in root.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_all_linear_leaves_the_output_layer_alone(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, "all-linear"))
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in trained_parameters(root)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def mixture() -> PreTrainedModel:
    """A mixture with a dense layer and shared experts, whose layers have the names of routed experts' of old."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "vocab_size": 32}
    return meta_model(Glm4MoeConfig(**shape, head_dim=8, first_k_dense_replace=1), torch.float32)


@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj", "up_proj", "down_proj"], ["*.shared_experts.up_proj"]])
def test_the_layers_that_are_named_are_adapted_in_a_mixture(targets: str | list[str]) -> None:
    model = mixture()
    wanted = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    if targets != "all-linear":
        wanted = {n for n in wanted if any(fnmatch(n, t) or fnmatch(n.rpartition(".")[2], t) for t in targets)}
    assert any("shared_experts" in name for name in wanted)
    add_lora(model, LoraSpec(2, 4, 0.0, targets), seed=3)
    assert {name for name, _ in lora_layers(model)} == wanted
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.lora_{part}.default.weight" for name in wanted for part in "AB"}
    assert "model.layers.1.mlp.experts.gate_up_proj" in str(left_out_experts(model))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")
def test_peft_would_adapt_the_routed_experts_in_their_place() -> None:
    model = mixture()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    taken = {name.rpartition(".")[2] for name in taken_for_experts(model, names)}
    assert taken == {"gate_proj", "up_proj", "down_proj"}
    inject_adapter_in_model(LoraConfig(r=2, target_modules=sorted(taken)), model)
    found = {name.rpartition(".")[2] for name, _ in lora_layers(model)}
    assert found == {"experts", "base_layer"}  # of each, one for each of its two tensors


@pytest.mark.parametrize(
    ("target", "said"), [("embed_tokens", "model.embed_tokens, a Embedding"), ("norm", "model.norm, a LlamaRMSNorm")]
)
def test_what_is_no_linear_layer_is_named_with_the_way_to_train_it(target: str, said: str) -> None:
    model = meta_model(family_config("llama", False), torch.float32)
    with pytest.raises(RecipeError, match=f"'{target}' means {said}: only linear layers") as refused:
        add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj", target]), seed=3)
    assert f"adapter.modules_to_save: [{target}]" in (refused.value.hint or "")
    add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj"], modules_to_save=[target]), seed=3)
    assert "lora" not in str([n for n, p in model.named_parameters() if p.requires_grad and target in n.split(".")])


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_a_tied_head_is_warned_of_before_the_run(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(adapter_module, "pass_on", said.append)
    model = family_model("llama", tied)
    add_lora(model, LoraSpec(2, 4, 0.0, ["q_proj", "lm_head"]), seed=3)
    assert tied_layers(model) == ({"lm_head": "model.embed_tokens"} if tied else {})
    assert ["--adapter keep" in text for text in said] == [True] * tied


def test_a_model_without_routed_experts_leaves_none_out(tmp_path: Path) -> None:
    assert left_out_experts(adapted(tmp_path, "llama").model) is None


def test_the_seed_decides_the_start_and_b_is_zero(tmp_path: Path) -> None:
    one, two = (trained_parameters(adapted(tmp_path, "qwen3")) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(not one[name].any() for name in one if "lora_B" in name)
    assert all(one[name].any() for name in one if "lora_A" in name)


def test_a_meta_model_has_the_same_parameters(tmp_path: Path) -> None:
    root = adapted(tmp_path, "gpt2", LoraSpec(2, 4, 0.0, "all-linear"))
    on_meta = meta_model(tiny_config("gpt2"), torch.float32)
    add_lora(on_meta, LoraSpec(2, 4, 0.0, "all-linear"), seed=3)
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in root.model.named_parameters()}
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in on_meta.named_parameters()} == shapes
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}


VARIANTS = {
    "rslora": LoraSpec(4, 8, 0.0, "all-linear", use_rslora=True),
    "dora": LoraSpec(4, 8, 0.0, "all-linear", use_dora=True),
    "saved": LoraSpec(4, 8, 0.0, "all-linear", modules_to_save=["lm_head", "embed_tokens"]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_adapter_changes_nothing(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = VARIANTS[variant]
    ids, rows = torch.arange(9), torch.arange(9)
    before = drawn_root(tiny_config("llama"), tmp_path, dtype=dtype)
    after = adapted(tmp_path, "llama", spec, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert torch.equal(before.logits(ids, rows, (9,), rows), after.logits(ids, rows, (9,), rows))
    assert {p.dtype for p in trained_parameters(after).values()} == {torch.float32}
    require_isolation(after, 97)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gpt2"])
def test_a_module_trained_in_full_is_trained_once(kind: str, tmp_path: Path) -> None:
    embedding = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    output = {"lm_head.weight"} if kind == "llama" else {embedding}
    for wish, expected in (("lm_head", output), (embedding.split(".")[1], {embedding})):
        root = adapted(tmp_path, kind, LoraSpec(2, 4, 0.0, "all-linear", modules_to_save=[wish]), torch.bfloat16)
        assert {name for name in trained_parameters(root) if ".lora_" not in name} == expected
        weights = root.model.get_input_embeddings().weight, root.model.get_output_embeddings().weight
        assert (weights[0] is weights[1]) == (kind != "llama"), "tied weights stay tied"
        require_isolation(root, 97)


def test_what_is_trained_in_full_gets_no_adapter(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, "all-linear", modules_to_save=["layers.0.mlp", "norm"]))
    names = set(trained_parameters(root))
    assert {"model.layers.0.mlp.up_proj.weight", "model.norm.weight"} < names
    assert not [name for name in names if name.startswith("model.layers.0.mlp") and ".lora_" in name]
    assert [name for name in names if name.startswith("model.layers.1.mlp") and ".lora_" in name]
    assert not [name for name in names if name.endswith("_layernorm.weight")]
    with pytest.raises(RecipeError, match="no linear layer is left"):
        adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, ["q_proj"], modules_to_save=["self_attn"]))


def test_globs_choose_layers(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", LoraSpec(2, 4, 0.0, ["model.layers.1.self_attn.[qk]_proj", "0.mlp.down_proj"]))
    assert [name for name, _ in lora_layers(root.model)] == [
        "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
    ]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", ["rslora", "dora"])
def test_the_scale_and_the_lengths_are_those_of_the_papers(variant: str, kind: str, tmp_path: Path) -> None:
    root = adapted(tmp_path, kind, VARIANTS[variant])
    name, layer = lora_layers(root.model)[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    stored = layer.get_base_layer().weight
    weight = stored.T if kind == "gpt2" else stored  # Conv1D holds it transposed
    expected = weight + b @ a * (8 / 4 if variant == "dora" else 8 / 4**0.5)
    if variant == "dora":
        expected = (
            expected / expected.norm(dim=1, keepdim=True) * layer.lora_magnitude_vector["default"].weight[:, None]
        )
    rows = torch.randn(3, weight.shape[1])
    torch.testing.assert_close(layer(rows), torch.nn.functional.linear(rows, expected, layer.get_base_layer().bias))


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_frozen_parameters_are_not_trained(kind: str, tmp_path: Path) -> None:
    root = drawn_root(tiny_config(kind), tmp_path)
    freeze(root.model, ["lm_head", "layers.0", "model.layers.1.*.weight"])
    expected = {"model.norm.weight"} | ({"model.embed_tokens.weight"} if kind == "llama" else set())
    assert set(trained_parameters(root)) == expected
    with pytest.raises(RecipeError, match="no parameter is left"):
        freeze(root.model, ["*"])
    with pytest.raises(RecipeError, match="model.freeze: 'layers.7'"):
        freeze(root.model, ["layers.7"])


@pytest.mark.parametrize("field", ["target_modules", "modules_to_save"])
def test_a_name_that_is_not_there_is_named(field: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"adapter.{field}: 'self_atn'") as caught:
        adapted(tmp_path, "llama", dataclasses.replace(SPEC, **{field: ["mlp", "self_atn"]}))
    assert caught.value.hint is not None
    assert "self_attn" in caught.value.hint


def test_frozen_weights_have_a_hash_and_trained_ones_none(tmp_path: Path) -> None:
    assert frozen_hash(drawn_root(tiny_config("llama"), tmp_path).model) is None
    hashes = []
    for seed in (1, 2):
        model: Any = drawn_root(tiny_config("llama"), tmp_path).model
        add_lora(model, LoraSpec(4, 8.0, 0.0, "all-linear", modules_to_save=("lm_head",)), seed)
        hashes.append(frozen_hash(model))
    assert hashes[0] == hashes[1] is not None
    weight = model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = weight.data[0, 0].clone()
    weight.data[0, 0] += 1
    assert frozen_hash(model) != hashes[0]
    weight.data[0, 0] = before
    model.lm_head.weight.data += 1
    assert frozen_hash(model) == hashes[0]
    model.to(torch.bfloat16)
    assert frozen_hash(model) != hashes[0]


def trained_step(root: CausalLM) -> tuple[list[torch.Tensor], set[int]]:
    """Loss and gradients of one step under autocast, and the storages that it keeps of layers' inputs ``[.., 32]``."""
    kept: set[int] = set()
    ids, rows = torch.arange(9), torch.arange(8)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape[-2:] == (9, 32):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    for name, parameter in trained_parameters(root).items():
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = root.train()(ids, ids, (9,), rows, ids[1:])
        count = len(kept)
    loss.backward()
    assert len(kept) == count
    return [loss.detach(), *(p.grad for p in trained_parameters(root).values() if p.grad is not None)], kept


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapters_input_is_not_kept_a_second_time_and_no_bit_changes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LoraSpec(2, 4, 0.0, "all-linear")
    found, few = trained_step(adapted(tmp_path, kind, spec, torch.bfloat16))
    monkeypatch.setattr("tuner.model.adapter._leave_input", lambda layer: None)
    wanted, many = trained_step(adapted(tmp_path, kind, spec, torch.bfloat16))
    assert len(found) == len(wanted) > 8 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if kind == "llama":  # GPT-2's inputs are float32
        assert len(few) <= len(many) - 2 * 3  # in each layer, of queries, keys, values and more


def test_an_adapter_with_dropout_and_without_autocast_takes_its_input_as_peft_makes_it(tmp_path: Path) -> None:
    dropped = lora_layers(adapted(tmp_path, "llama", LoraSpec(2, 4, 0.5, "all-linear"), torch.bfloat16).model)
    assert all("_cast_input_dtype" not in vars(layer) for _, layer in dropped)
    root = adapted(tmp_path, "llama", SPEC, torch.bfloat16)
    with torch.no_grad():
        assert root.logits(torch.arange(5), torch.arange(5), (5,), torch.arange(5)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_adapter_of_the_output_layer_is_trained_as_the_layers_own_call_has_it(
    kind: str, dropout: float, tmp_path: Path
) -> None:
    """A loss takes the layer as a matrix: it has to be the adapted one, with the gradients of the adapter."""
    root = adapted(tmp_path, kind, LoraSpec(2, 8, dropout, ["q_proj", "lm_head"]))
    head: Any = root.model.get_output_embeddings()
    nn.init.normal_(head.lora_B["default"].weight, std=0.1, generator=torch.Generator().manual_seed(0))
    inputs = packed_inputs(random_ids(97)[:60], (40, 20))
    root.train()

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        root.zero_grad()
        loss.backward()
        return {name: one.grad.clone() for name, one in trained_parameters(root).items() if one.grad is not None}

    def by_the_layer(objective: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(head(hidden), targets, reduction="sum")

    torch.manual_seed(1)
    ours = root(document_lengths=(40, 20), **inputs)
    found = gradients(ours)
    root.at_head = by_the_layer  # type: ignore[method-assign,assignment]
    torch.manual_seed(1)
    theirs = root(document_lengths=(40, 20), **inputs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    wanted = gradients(theirs)
    assert found.keys() == wanted.keys() and all(found[name].any() for name in found if "lm_head" in name)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_without_its_adapter_the_output_layer_is_the_models(tmp_path: Path) -> None:
    root = adapted(tmp_path, "llama", LoraSpec(2, 8, 0.0, ["q_proj", "lm_head"]))
    inputs = packed_inputs(random_ids(97)[:60], (40, 20))
    before = root(document_lengths=(40, 20), **inputs)
    for name, one in trained_parameters(root).items():
        if "lora_B" in name:
            nn.init.normal_(one, std=0.1)
    assert root(document_lengths=(40, 20), **inputs) != before
    with adapter_off(root.model):
        assert torch.equal(root(document_lengths=(40, 20), **inputs), before)


def test_dora_of_the_output_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="lm_head is the output layer, which losses take as one matrix") as refused:
        adapted(tmp_path, "llama", LoraSpec(2, 8, 0.0, ["q_proj", "lm_head"], use_dora=True))
    assert "adapter.kind: lora" in (refused.value.hint or "")


TOKENS, INPUTS, OUTPUTS = 24, 16, 32


def layer(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64))
    model.requires_grad_(False)
    config = LoraConfig(r=4, lora_alpha=10, lora_dropout=dropout, target_modules=["0"])
    inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return model[0].to(dtype)


def results(one: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    source = torch.randn(1, TOKENS, INPUTS, dtype=dtype, requires_grad=True)
    output = one(source)
    output.pow(2).sum().backward()
    grads = [one.lora_A[ADAPTER].weight.grad, one.lora_B[ADAPTER].weight.grad]
    return [output.detach(), source.grad, *grads]  # type: ignore[list-item]


def passes(func: Any, args: Any, result: Any) -> list[str]:
    """Elementwise operations over as many numbers as the layer's result has."""
    is_one = func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.add)
    return [str(func)] if is_one and result.numel() == TOKENS * OUTPUTS else []


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_values_and_gradients_are_pefts(dropout: float) -> None:
    expected, ours = layer(dropout=dropout), layer(dropout=dropout)
    add_in_product(ours)
    torch.testing.assert_close(results(ours), results(expected), rtol=1e-12, atol=1e-12)


def test_no_pass_over_the_result_is_left() -> None:
    counts = []
    for fused in (False, True):
        one = layer()
        if fused:
            add_in_product(one)
        source = torch.randn(1, TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
        with Operations(passes) as seen:
            one(source).backward(torch.ones(1, TOKENS, OUTPUTS, dtype=torch.float64))
        counts.append(len(seen.found))
    assert counts == [3, 0]


def test_under_autocast_it_rounds_less_often_than_peft() -> None:
    exact = results(layer())[0]
    errors = []
    for fused in (False, True):
        one = layer(torch.float32)
        if fused:
            add_in_product(one)
        torch.manual_seed(1)
        source = torch.randn(1, TOKENS, INPUTS, dtype=torch.float64).float()
        with torch.autocast("cpu", torch.bfloat16):
            output = one(source).detach()
        assert output.dtype == torch.bfloat16
        errors.append(float((output.double() - exact).norm() / exact.norm()))
    assert errors[1] < errors[0] < 0.02


def test_a_model_gets_it_in_every_plain_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = adapted(tmp_path, "llama")
    layers = [each for _, each in lora_layers(root.model)]
    assert layers and all(takes_product(each, ADAPTER) and "forward" in vars(each) for each in layers)
    where = (torch.arange(4), torch.arange(4), (4,), torch.arange(4))
    plain = drawn_root(tiny_config("llama"), tmp_path).model
    with adapter_off(root.model):
        without = root.logits(*where)
    for each in layers:
        torch.nn.init.normal_(each.lora_B[ADAPTER].weight)
    monkeypatch.setattr(adapter.adaptable, "add_in_product", lambda *_: None)
    add_lora(plain, SPEC, seed=3)
    plain.load_state_dict(root.model.state_dict())
    theirs = type(root)(plain).logits(*where)
    torch.testing.assert_close(root.logits(*where), theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(without, theirs)


def test_dora_keeps_its_own(tmp_path: Path) -> None:
    from dataclasses import replace

    root = adapted(tmp_path, "llama", replace(SPEC, use_dora=True))
    assert not any("forward" in vars(each) for _, each in lora_layers(root.model))
