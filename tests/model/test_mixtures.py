"""Mixtures as they are built: biases that choose experts are exact, and trained by nobody, wherever a model is made."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from tests.model.tiny import SHAPE
from tuner.model.build import ModelSpec, build_model, meta_model
from tuner.parallel.fsdp import rounded_weights

EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 0},
}
BIAS = "e_score_correction_bias"


def config_of(kind: str) -> PretrainedConfig:
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    shape = SHAPE | {"moe_intermediate_size": 16, "first_k_dense_replace": 0} | EXPERTS[kind]
    latent = heads | {"num_key_value_heads": 4} if kind == "deepseek_v3" else {}
    return CONFIG_MAPPING[kind](**shape | latent)


def biases(model: PreTrainedModel) -> list[torch.Tensor]:
    found = [tensor for name, tensor in model.state_dict(keep_vars=True).items() if name.endswith(BIAS)]
    assert len(found) == 2
    return found


def test_what_a_class_keeps_in_float32_is_so_however_a_model_is_made(tmp_path: Path) -> None:
    config = config_of("deepseek_v3")
    config.save_pretrained(tmp_path)
    drawn = build_model(ModelSpec(str(tmp_path), random_init=True), torch.bfloat16, seed=0)
    drawn.save_pretrained(tmp_path)
    loaded = build_model(ModelSpec(str(tmp_path)), torch.bfloat16, seed=0)
    for model in (drawn, loaded, meta_model(config, torch.bfloat16)):
        assert {bias.dtype for bias in biases(model)} == {torch.float32}
        assert model.get_parameter("model.layers.0.mlp.gate.weight").dtype == torch.bfloat16


def test_what_a_class_never_trains_is_not_trained_after_loading(tmp_path: Path) -> None:
    config = config_of("ernie4_5_moe")
    config.save_pretrained(tmp_path)
    drawn = build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=0)
    drawn.save_pretrained(tmp_path)
    loaded = build_model(ModelSpec(str(tmp_path)), torch.float32, seed=0)
    for model in (drawn, loaded, meta_model(config, torch.float32)):
        assert not any(bias.requires_grad for bias in biases(model))
        assert model.get_parameter("model.layers.0.mlp.gate.weight").requires_grad


class Reads(torch.nn.Module):
    """A router that multiplies in float32, as LongCat's."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = torch.nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.classifier.weight.float())


def test_a_router_that_reads_its_weight_is_not_gathered_in_bfloat16() -> None:
    unit = torch.nn.ModuleDict({"router": Reads(), "mlp": torch.nn.Sequential(torch.nn.Linear(4, 4))})
    assert {tuple(weight.shape) for weight in rounded_weights(unit)} == {(4, 4)}
