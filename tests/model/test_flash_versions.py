"""Later flash attentions: taken where installed, on their devices, once they give the second one's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, MambaConfig

from tests.model.cuda_branch import config_of
from tests.model.varlen_stand_in import CALLS
from tuner.config.load import load_recipe
from tuner.model import flash_attention, flash_versions
from tuner.model.flash_versions import Heads, kernel_and_reason, use_flash_version
from tuner.runtime.device import traced_for
from tuner.runtime.dist import RankInfo

CPU = torch.device("cpu")


@dataclass
class Torch:
    """What torch would have activated, and how it computes."""

    active: str | None = None
    changes: list[str] = field(default_factory=list)
    factor: float = 1.0
    problem: str | None = None

    def activate(self, name: str) -> None:
        self.active = name
        self.changes.append(name)

    def restore(self) -> None:
        self.active = None
        self.changes.append("restored")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Torch:
    """Both packages are installed; what is active computes with the stand-in's numbers times a factor, or fails."""
    found = Torch()
    plain = flash_attention.varlen_attn

    def varlen_attn(*given: Any, **options: Any) -> Any:
        output, normaliser = plain(*given, **options)
        if found.active is not None and found.problem is not None:
            raise RuntimeError(found.problem)
        return output * (found.factor if found.active else 1.0), normaliser

    monkeypatch.setattr(flash_attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", found.activate)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", found.restore)
    monkeypatch.setattr(flash_versions, "_is_there", lambda module: True)
    monkeypatch.setattr(flash_versions, "_problems", {})
    monkeypatch.setattr(flash_versions, "_ours", [])
    CALLS.clear()
    return found


def use(kind: str, generation: int, **changes: Any) -> str:
    config = config_of(kind)
    for name, value in {"num_attention_heads": 2, "num_key_value_heads": 1, **changes}.items():
        setattr(config, name, value)
    with traced_for("cuda", generation=generation):
        use_flash_version(config, CPU)
    return kernel_and_reason(config, generation, "bf16", is_here=True)


@pytest.mark.parametrize(
    ("generation", "width", "name", "words"),
    [
        (9, 256, "FA3", "flash attention 3: flash_attn_interface is installed"),
        (10, 128, "FA4", "flash attention 4: flash_attn.cute.interface is installed"),
        (10, 256, None, "flash attention 2"),
        (8, 64, None, "flash attention 2"),
        (12, 64, None, "flash attention 2"),
    ],
)
def test_each_is_for_its_devices_and_heads(
    generation: int, width: int, name: str | None, words: str, there: Torch
) -> None:
    assert use("llama", generation, head_dim=width) == words
    assert there.active == name


def test_what_is_right_is_tried_once_and_stays(there: Torch) -> None:
    use("llama", 9)
    assert (there.active, there.changes) == ("FA3", ["FA3", "restored", "FA3"])
    tried = len(CALLS)
    assert tried == 8, "with a window and without, forward and backward, by both"
    use("llama", 9)
    assert len(CALLS) == tried and there.active == "FA3"
    assert use("gemma2", 9) == "tuner's Triton kernel: scores have a soft cap"
    assert there.active is None, "a model that it does not serve has torch's own again"


@pytest.mark.parametrize(
    ("factor", "problem", "said"),
    [(1.1, None, r"its results differ by \d+\.\d%"), (1.0, "no kernel image", "no kernel image")],
)
def test_what_is_wrong_or_fails_is_not_used_and_that_is_said(
    factor: float, problem: str | None, said: str, there: Torch
) -> None:
    there.factor, there.problem = factor, problem
    with pytest.warns(UserWarning, match=f"flash_attn_interface is installed, and flash attention 2 is used: {said}"):
        use("llama", 9)
    assert there.active is None and there.changes == ["FA3", "restored"]
    with pytest.warns(UserWarning, match="is used"):
        use("llama", 9)
    assert there.changes == ["FA3", "restored"], "tried once"


def test_layers_of_several_kinds_are_told_apart(there: Torch) -> None:
    """Gemma 4's layers with a window have heads of 256 channels, the others of 512; a model without heads has none."""
    config = Gemma4TextConfig(num_attention_heads=2, num_key_value_heads=1)
    assert {heads.widest for heads in Heads.of(config)} == {256, 512}
    words = "tuner's Triton kernel: heads have 512 channels"
    assert set(kernel_and_reason(config, 8, "bf16", is_here=False).split("; ")) == {"flash attention 2", words}
    with traced_for("cuda", generation=9):
        use_flash_version(config, CPU)
    assert there.active == "FA3"
    assert (Heads.of(MambaConfig()), kernel_and_reason(MambaConfig(), 9, "bf16", True)) == ([], "the model's own")


def test_attention_with_dropout_keeps_torchs_own(there: Torch) -> None:
    assert use("llama", 9, attention_dropout=0.1) == "torch's, document by document: attention has dropout"
    assert there.active is None


def test_without_a_package_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", pytest.fail)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: pytest.fail("restored"))
    assert use("llama", 9) == use("llama", 10) == "flash attention 2"
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    monkeypatch.setattr(flash_versions, "_is_there", lambda module: True)
    assert use("llama", 9) == "flash attention 2"


def test_a_package_is_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "later_flash_attention.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("later_flash_attention", "no_flash_attention", "no_flash_attention.cute.interface")
    assert [flash_versions._is_there(name) for name in names] == [True, False, False]


def test_it_is_chosen_where_a_model_is_built_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from tuner.setup import model
    from tuner.setup.resolve import resolve

    config_of("llama").save_pretrained(tmp_path)
    recipe = load_recipe({"model": {"name_or_path": str(tmp_path), "init": "random"}, "data": {"train": "r.jsonl"}})
    resolved, chosen = resolve(recipe.recipe, 64, RankInfo()), []
    monkeypatch.setattr(model, "_device", lambda facts, rank_info: torch.device("cuda", 0))
    take = "use_flash_version"
    monkeypatch.setattr(flash_versions, take, lambda config, device: chosen.append((config.model_type, device)))
    monkeypatch.setattr(model, "assembled", lambda *args: None)
    model.assemble_model(resolved, RankInfo())
    assert chosen == [("llama", torch.device("cuda", 0))]
