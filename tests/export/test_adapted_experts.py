"""Exports of adapters on routed experts: merged into files of each expert or of all, and kept as peft loads them.

Mixtures with shared experts, dense layers and biases of routers; what the campaign does for more of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config

from tests.export.mixtures import round_trip, trained_model, write_mixture
from tests.export.runs import PROMPTS, without_the_base_in_memory, write_run
from tests.model.tiny import SHAPE, family_config
from tuner.api.exports import export_hf
from tuner.errors import RecipeError
from tuner.export.source import ExportSource
from tuner.export.verify import last_logits
from tuner.export.weights import load_trained
from tuner.init_from.sources import open_source
from tuner.model.adapter import LoraSpec
from tuner.rundir.model_path import resolve_model_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

SPEC = LoraSpec(3, 6.0, 0.1, "all-linear", use_rslora=True, experts=True)
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": ["full_attention"] * 2}


@pytest.fixture(scope="module", params=["qwen3-moe", "gpt-oss"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("experts")
    is_gpt_oss = request.param == "gpt-oss"
    config = CONFIG_MAPPING["gpt_oss"](**SHAPE, **_GPT_OSS) if is_gpt_oss else family_config(request.param, False)
    base = write_mixture(config, place / "base")
    return write_run(place / "run", base, SPEC, amount=0.2), base


def merged(state: dict[str, torch.Tensor], is_transposed: bool) -> dict[str, torch.Tensor]:
    """The weights of all experts, W + s·B·A, from the tensors of a model with its adapter."""
    found = {}
    for name in [name for name in state if name.endswith("_lora_A")]:
        weight = name.removesuffix("_lora_A")
        added = torch.einsum("eor,eri->eoi", state[f"{weight}_lora_B"], state[name]) * (SPEC.alpha / SPEC.r**0.5)
        found[weight] = state[weight] + (added.mT if is_transposed else added)
    return found


def test_merged_and_kept_they_are_the_trained_model(run: tuple[Path, Path], tmp_path: Path) -> None:
    directory, base = run
    trained = trained_model(directory, base, SPEC)
    wanted, state = last_logits(trained, PROMPTS), trained.state_dict()
    is_transposed = trained.config.model_type == "gpt_oss"

    whole = export_hf(directory, tmp_path / "merged", dtype="fp32").path
    assert load_file(whole / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    loaded: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    weights = merged(state, is_transposed)
    assert len(weights) == 4
    for name, weight in weights.items():
        assert torch.allclose(loaded.get_parameter(name), weight, atol=1e-6), name
        assert not torch.allclose(state[name], weight, atol=1e-2), name
    assert (last_logits(loaded, PROMPTS) - wanted).abs().max() < 1e-3

    kept = export_hf(directory, tmp_path / "kept", adapter="keep", dtype="fp32").path
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with_peft: Any = PeftModel.from_pretrained(plain, str(kept)).eval()
    assert (last_logits(with_peft, PROMPTS) - wanted).abs().max() < 1e-3
    peft_merged = with_peft.merge_and_unload()
    for name, weight in weights.items():
        assert torch.allclose(peft_merged.get_parameter(name), weight, atol=1e-6), name


def test_the_model_of_a_run_is_loaded_with_them_and_others_do_not_begin_with_it(run: tuple[Path, Path]) -> None:
    directory, base = run
    found: Any = resolve_model_path(directory, lambda line: None)
    loaded = load_trained(ExportSource.of(found))
    wanted = last_logits(trained_model(directory, base, SPEC), PROMPTS)
    assert torch.allclose(last_logits(loaded, PROMPTS), wanted, atol=1e-6)
    with pytest.raises(RecipeError, match="its adapter is one of routed experts, too") as caught:
        open_source(directory, hashes=False)
    assert "tuner export-hf" in (caught.value.hint or "")


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
HEADS = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def test_each_expert_comes_back_as_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_base_in_memory(monkeypatch)
    shape = SHAPE | EXPERTS | HEADS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    assert round_trip(DeepseekV3Config(**shape), tmp_path, per_expert=True)["full-fp32"] == 4 * 3
