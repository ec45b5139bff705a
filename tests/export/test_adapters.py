"""Exports of adapters by peft's own configs: merged as peft merges, kept as peft loads them, and what is found.

Adapters on routed experts are merged into files of each expert or of all, and kept as peft loads them. Mixtures have
shared experts, dense layers and biases of routers; what the campaign does for more of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config

from tests.export.mixtures import round_trip, trained_model, write_mixture
from tests.export.runs import PROMPTS, recorded, without_the_base_in_memory, write_base, write_run
from tests.fixtures.peft_kinds import KINDS
from tests.model.tiny import SHAPE, family_config
from tuner.api.exports import export_hf
from tuner.errors import DataError, RecipeError, VerificationError
from tuner.export import outputs
from tuner.export.source import ExportSource
from tuner.export.verify import last_logits
from tuner.export.weights import load_trained
from tuner.init_from.sources import open_source
from tuner.model.adapter import LoraSpec
from tuner.model.peft_kinds import PeftSpec, merged_weights
from tuner.model.vetting import vet_adapter
from tuner.rundir.model_path import resolve_model_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("model") / "base", "llama")


def written(place: Path, base: Path, name: str) -> Path:
    spec = PeftSpec(KINDS[name], "init_lora_weights" in KINDS[name])
    return write_run(place / "run", base, spec, amount=0.1)


@pytest.mark.slow("vera", "boft", "loha", "olora", "patterns", "hra", "miss")
@pytest.mark.parametrize("name", KINDS)
def test_merged_and_kept_they_are_the_trained_model(name: str, base: Path, tmp_path: Path) -> None:
    run = written(tmp_path, base, name)
    wanted = recorded(run)
    whole = export_hf(run, tmp_path / "merged", dtype="fp32").path
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    size = float(wanted.abs().max())
    assert (last_logits(plain, PROMPTS) - wanted).abs().max() > 1e-4 * size
    loaded: Any = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    assert (last_logits(loaded, PROMPTS) - wanted).abs().max() < 1e-5 * size
    kept = export_hf(run, tmp_path / "kept", adapter="keep", dtype="fp32").path
    facts = json.loads((kept / "adapter_config.json").read_text())
    assert facts["peft_type"] == KINDS[name]["peft_type"] and facts["inference_mode"] is True
    vet_adapter(kept)  # as it is read again
    with_peft: Any = PeftModel.from_pretrained(plain, str(kept)).eval()
    assert (last_logits(with_peft, PROMPTS) - wanted).abs().max() < 1e-5 * size


def test_a_wrong_merge_is_found(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, base, "lokr")

    def off(model: Any) -> dict[str, torch.Tensor]:
        found = merged_weights(model)
        return {name: one * (1 + 1e-3 * name.endswith("0.mlp.down_proj.weight")) for name, one in found.items()}

    monkeypatch.setattr(outputs, "merged_weights", off)
    with pytest.raises(VerificationError, match="layers.0.mlp.down_proj.weight: .* are not the trained ones"):
        export_hf(run, tmp_path / "merged", dtype="fp32")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("name", "field"), [("vera", "r"), ("loha", "r"), ("adalora", "init_r")])
def test_an_adapter_that_would_allocate_more_than_its_files_hold_is_refused(
    name: str, field: str, base: Path, tmp_path: Path
) -> None:
    kept = export_hf(written(tmp_path, base, name), tmp_path / "kept", adapter="keep", dtype="fp32").path
    path = kept / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: 10**9}))
    with pytest.raises(DataError, match="a rank of 1000000000"):
        vet_adapter(kept)


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


def test_experts_merged_and_kept_are_the_trained_model(run: tuple[Path, Path], tmp_path: Path) -> None:
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
