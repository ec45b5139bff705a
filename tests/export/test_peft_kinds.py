"""Exports of adapters by peft's own configs: merged as peft merges, kept as peft loads them, and what is found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.export.runs import PROMPTS, recorded, write_base, write_run
from tests.fixtures.peft_kinds import KINDS
from tuner.api.exports import export_hf
from tuner.errors import DataError, VerificationError
from tuner.export import outputs
from tuner.export.verify import last_logits
from tuner.model.peft_kinds import PeftSpec, merged_weights
from tuner.model.vetting import vet_adapter

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
