"""Mixtures with shared experts, dense layers and biases of routers; what the campaign does for more of them."""

from pathlib import Path

import pytest
from transformers import DeepseekV3Config

from tests.export.mixtures import round_trip
from tests.export.runs import without_the_base_in_memory
from tests.model.tiny import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
HEADS = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def test_each_expert_comes_back_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_base_in_memory(monkeypatch)
    shape = SHAPE | EXPERTS | HEADS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    assert round_trip(DeepseekV3Config(**shape), tmp_path, per_expert=True)["full-fp32"] == 4 * 3
