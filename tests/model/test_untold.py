"""Attention that its own class tells by a mask alone where documents lie, or how far back a token sees."""

from pathlib import Path

import pytest
import torch
from transformers import NemotronConfig, PhimoeConfig, PretrainedConfig, Qwen2MoeConfig, StableLmConfig

from tests.fixtures.packed import LENGTHS, alone, drawn_root, packed_inputs, random_ids, relative
from tests.model.tiny import SHAPE, VOCAB
from tuner.model.build import ModelSpec, build_model
from tuner.model.probe import prove_route

WINDOW = 8
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOME = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": WINDOW}
CASES: dict[str, tuple[PretrainedConfig, list[int | None]]] = {
    "stablelm": (StableLmConfig(**SHAPE), [None, None]),
    "nemotron": (NemotronConfig(**SHAPE, head_dim=8), [None, None]),
    "qwen2_moe": (Qwen2MoeConfig(**SHAPE, **EXPERTS, **SOME, shared_expert_intermediate_size=16), [None, WINDOW]),
    "phimoe": (PhimoeConfig(**SHAPE, num_local_experts=4, sliding_window=WINDOW), [WINDOW, WINDOW]),
    "phimoe without": (PhimoeConfig(**SHAPE, num_local_experts=4), [None, None]),
}


@pytest.mark.parametrize("name", CASES)
def test_documents_lie_end_to_end(name: str, tmp_path: Path) -> None:
    config, windows = CASES[name]
    root = drawn_root(config, tmp_path)
    for parameter in root.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layers = root.model.model.layers
    assert [getattr(layer.self_attn, "tuner_window", None) for layer in layers] == windows
    assert root.layout.route == "flat" and prove_route(root, VOCAB, True, max(LENGTHS)) is None
    inputs, everywhere = packed_inputs(random_ids(VOCAB), LENGTHS), torch.arange(sum(LENGTHS))
    with torch.no_grad():
        packed = root.logits(inputs["input_ids"], inputs["position_ids"], LENGTHS, everywhere)
        assert relative(packed, root.model.lm_head(alone(root, inputs["input_ids"], LENGTHS))) < 1e-5


def test_a_model_whose_layers_hand_on_what_they_take_is_left_as_it_is(tmp_path: Path) -> None:
    Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=16).save_pretrained(tmp_path)
    model = build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=1)
    assert not any("forward" in vars(module) or hasattr(module, "tuner_window") for module in model.modules())
