"""Architectures whose configs are unlike others' are trained, saved and exported, or refused before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import tuner
from tests.model.tiny import SHAPE
from tuner.checkpoint.open import newest
from tuner.config.paths import recipes_dir
from tuner.errors import DataError, RecipeError
from tuner.run import state

SIZES = SHAPE | {"vocab_size": 320}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8, "attn_layer_indices": [1]}
_EXPERTS = {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "bamba": transformers.BambaConfig(**SIZES, **_MAMBA),  # a bound of its config is infinite
    "mamba": transformers.MambaConfig(vocab_size=320, hidden_size=16, state_size=4, num_hidden_layers=2),  # no heads
    "rwkv": transformers.RwkvConfig(vocab_size=320, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2),
    "llama4_text": transformers.Llama4TextConfig(**SIZES, **_EXPERTS),
    "mpt": transformers.MptConfig(vocab_size=320, d_model=32, n_heads=4, n_layers=2, max_seq_len=128),
    "gptj": transformers.GPTJConfig(vocab_size=320, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=128),
}


def recipe(tmp_path: Path, kind: transformers.PretrainedConfig, **model: Any) -> dict[str, Any]:
    kind.save_pretrained(tmp_path / "model")
    return {
        "output_dir": str(tmp_path / "run"),
        "model": {"name_or_path": str(tmp_path / "model"), "init": "random", **model},
        "tokenizer": {"name_or_path": "byte"},
        "method": {"kind": "pretrain"},
        "data": {"train": str(recipes_dir() / "data" / "notes.jsonl"), "max_length": 32, "packing": False},
        "train": {"duration": "2 steps", "global_batch_size": 2, "micro_batch_size": 1, "device": "cpu"},
    }


# What mpt does is in the test of packed rows, too.
@pytest.mark.slow("llama4_text", "rwkv")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("mpt", "mamba", "gptj") else ()) for kind in CONFIGS]
)
def test_it_is_trained_saved_and_exported(kind: str, tmp_path: Path) -> None:
    run = tuner.train(recipe(tmp_path, CONFIGS[kind])).run_dir
    saved = newest(run / "checkpoints")
    assert saved is not None
    assert saved.step == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["mfu" in line for line in lines] == [kind not in ("mamba", "rwkv")] * 2
    report = tuner.export_hf(run)
    assert report.max_difference is not None
    if kind == "bamba":
        written = [json.loads((path / "config.json").read_text()) for path in (run / "model_config", report.path)]
        facts = saved.meta["model"]["config"]
        for config in (*written, facts):
            assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]


def test_a_number_that_no_recipe_can_hold_is_refused(tmp_path: Path) -> None:
    wish = recipe(tmp_path, CONFIGS["bamba"], config={"time_step_limit": [0.0, float("inf")]})
    with pytest.raises(RecipeError, match=r"model\.config\.time_step_limit: .*inf"):
        tuner.train(wish)


def test_facts_that_no_checkpoint_can_hold_end_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = state.manifest_facts

    def unwritable(*given: Any, **named: Any) -> dict[str, Any]:
        return {**facts(*given, **named), "key": float("inf")}

    monkeypatch.setattr(state, "manifest_facts", unwritable)
    with pytest.raises(DataError, match="cannot be written into a checkpoint"):
        tuner.train(recipe(tmp_path, CONFIGS["gptj"]))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_balances_a_routers_experts_is_said_to_be_no_part_of_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = SIZES | {"head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
    tuner.train(recipe(tmp_path, transformers.Qwen3MoeConfig(**sizes, router_aux_loss_coef=0.001)))
    said = " ".join((tmp_path / "run" / "logs" / "rank0.log").read_text().split()) + capsys.readouterr().err
    assert "router_aux_loss_coef: 0.001 of the model's config is not part of the loss" in said


def test_rows_are_packed_for_models_that_do_not_take_them_end_to_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wish = recipe(tmp_path, CONFIGS["mpt"])
    wish["data"] |= {"packing": "auto", "eval": "2 documents"}
    wish["train"] |= {"global_batch_size": 2}
    run = tuner.train(wish).run_dir
    said = capfd.readouterr().err
    assert "documents as a padded batch: " in said and "% padding, " in said
    assert "warning" not in said
    assert "packing: auto  # auto: documents as a padded batch: " in (run / "recipe.resolved.yaml").read_text()
    assert tuner.export_hf(run).max_difference is not None
    resumed = tuner.train(wish | {"train": wish["train"] | {"stop_after": "1 steps"}})
    assert resumed.status == "finished"
    wish["data"]["packing"], wish["output_dir"] = True, str(tmp_path / "other")
    with pytest.raises(RecipeError, match="packed rows|end to end") as caught:
        tuner.train(wish)
    assert "write data.packing: auto" in str(caught.value.hint)
