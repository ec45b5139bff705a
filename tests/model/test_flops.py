"""The arithmetic of training, by hand, and as torch counts the operations of the plain model."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.model.tiny import SHAPE, tiny_config
from tuner.model.adapter import LoraSpec, add_lora
from tuner.model.build import meta_model
from tuner.model.flops import Flops, _attention, training_flops


def tiny(kind: str) -> transformers.PreTrainedModel:
    return meta_model(tiny_config(kind), torch.float32)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gpt2"])
def test_products_are_those_that_torch_counts(kind: str) -> None:
    config = tiny_config(kind)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.arange(12)[None] % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    found = training_flops(tiny(kind)).parts([12], 12)
    # Eager attention multiplies what is masked too: twice the pairs.
    assert counter.get_total_flops() == found["layers"] + found["output"] + 2 * found["attention"]


def test_an_adapter_costs_what_is_trained_and_the_gradients_through_the_rest() -> None:
    model = tiny("llama")
    full = training_flops(model)
    add_lora(model, LoraSpec(4, 8, 0.0, "all-linear"), seed=0)
    lora = training_flops(model)
    added = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert lora.products == full.products * 4 / 6 + 6 * added
    assert (lora.output, lora.attention) == (full.output * 4 / 6, full.attention)


def test_a_module_trained_in_full_beside_an_adapter_counts_once() -> None:
    model = tiny("llama")
    full = training_flops(model)
    add_lora(model, LoraSpec(4, 8, 0.0, ["q_proj"], modules_to_save=["lm_head"]), seed=0)
    assert training_flops(model).output == full.output


def test_a_token_meets_its_experts_alone() -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    found = training_flops(meta_model(config, torch.float32)).products
    config.num_experts_per_tok = 8
    whole = training_flops(meta_model(config, torch.float32)).products
    assert whole - found == 6 * 6 * (3 * 32 * 16) * 2  # six experts fewer, in two layers


def test_a_window_hides_what_lies_behind_it() -> None:
    found = Flops(0.0, 0.0, {None: 1.0, 4: 1.0}).parts([10, 3], 0)
    pairs = sum(1 for i in range(10) for j in range(i + 1) if i - j < 4)
    assert found["attention"] == 10**2 + 3**2 + (10**2 - 6**2) + 3**2
    assert 2 * pairs == pytest.approx(10**2 - 6**2, abs=10)  # the diagonal


def test_layers_of_each_kind_have_their_window() -> None:
    config = tiny_config("gemma3")
    flops = training_flops(tiny("gemma3"))
    layers = [None if kind == "full_attention" else config.sliding_window for kind in config.layer_types]
    each = 6 * config.num_attention_heads * config.head_dim
    assert flops.attention == {window: each * layers.count(window) for window in set(layers)}


_GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
UNLIKE = {
    "no heads": transformers.MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2),
    "heads of several sizes": transformers.Gemma4TextConfig(**SHAPE | {"num_hidden_layers": 6}, **_GEMMA4),
}


@pytest.mark.parametrize("config", UNLIKE.values(), ids=UNLIKE)
def test_a_config_that_does_not_say_its_heads_leaves_attention_out_and_says_so(config: Any) -> None:
    found = training_flops(meta_model(config, torch.float32))
    assert not found.complete
    assert found.products > 0
    assert found.attention == {}
    assert training_flops(tiny("llama")).complete


def test_chunks_hide_what_lies_in_others() -> None:
    config = transformers.Llama4TextConfig(**SHAPE, head_dim=8, attention_chunk_size=4, num_local_experts=2)
    pairs = sum(2 * (size * (size + 1) // 2) - size for size in (4, 4, 2))
    assert Flops(0.0, 0.0, {}, chunks={4: 3.0}).parts([10], 0)["attention"] == 3.0 * pairs
    assert _attention(config) == ({}, {4: 2 * 6.0 * 4 * 8})
    config.layer_types = ["chunked_attention", "full_attention"]
    assert _attention(config) == ({None: 6.0 * 4 * 8}, {4: 6.0 * 4 * 8})
