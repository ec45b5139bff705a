"""A small model of an architecture keeps what decides about layouts, and every kind of layer.

Of its made-up rows every layout computes the same ones, each once.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from tuner.config.load import load_recipe
from tuner.config.methods import DpoMethod, KtoMethod, PretrainMethod, SftMethod
from tuner.config.methods import Method as MethodSection
from tuner.errors import RecipeError
from tuner.model.build import decoder_blocks, meta_model
from tuner.parallel.mesh import Mesh
from tuner.prove.layouts import parse
from tuner.prove.prove import refused
from tuner.prove.training import STEPS_APART, ProofRows
from tuner.prove.twin import LONGEST, MOST_LAYERS, RATE, ROWS, WINDOW, kept, make_twin, shrunk
from tuner.train.methods.method import build_method

MOST_PARAMETERS = 2_000_000
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
LLAMA, QWEN3 = transformers.LlamaConfig, transformers.Qwen3Config
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": LLAMA(num_key_value_heads=8, vocab_size=128_256),
    "smollm2": LLAMA(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3),
    "qwen3": QWEN3(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True),
    "gemma3": transformers.Gemma3TextConfig(num_key_value_heads=1),
    "gemma3-images": transformers.Gemma3Config(),
    "phi": transformers.PhiConfig(),
    "phi3": transformers.Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=4096),
    "gpt2": transformers.GPT2Config(),
    "qwen3-moe": transformers.Qwen3MoeConfig(num_experts=128, num_experts_per_tok=8, mlp_only_layers=[3]),
    "mixtral": transformers.MixtralConfig(),
    "deepseek": transformers.DeepseekV3Config(),
}  # fmt: skip


@given(st.integers(1, 10_000))
def test_divisors_stay(number: int) -> None:
    small = kept(number)
    assert small <= 20 and (small == 1) == (number == 1)
    assert [small % size == 0 for size in (2, 4)] == [number % size == 0 for size in (2, 4)]
    assert number % 3 or number < 3 or small % 3 == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_small_model_keeps_divisors_ties_and_kinds(name: str) -> None:
    whole = CONFIGS[name].get_text_config()
    small = shrunk(CONFIGS[name])
    for key in ("num_attention_heads", "num_key_value_heads", "vocab_size"):
        own, few = (getattr(config, key, None) or 1 for config in (whole, small))
        assert [few % size == 0 for size in (2, 4)] == [own % size == 0 for size in (2, 4)], key
        assert (few == 1) == (own == 1)
    assert small.tie_word_embeddings == whole.tie_word_embeddings
    assert set(getattr(small, "layer_types", None) or []) == set(getattr(whole, "layer_types", None) or [])
    model = meta_model(small, torch.float32)
    assert 2 <= len(decoder_blocks(model)) <= MOST_LAYERS
    assert model.num_parameters() < MOST_PARAMETERS


def test_windows_experts_and_positions_are_short_and_there() -> None:
    assert shrunk(CONFIGS["gemma3"]).sliding_window == WINDOW < LONGEST
    mixture = shrunk(CONFIGS["qwen3-moe"])
    assert (mixture.num_experts, mixture.num_experts_per_tok, mixture.mlp_only_layers) == (8, 2, [1])
    deepseek = shrunk(CONFIGS["deepseek"])
    assert (deepseek.first_k_dense_replace, deepseek.num_hidden_layers, deepseek.n_group) == (1, 2, 2)
    assert shrunk(CONFIGS["gpt2"]).n_positions == 2 * LONGEST
    assert len(shrunk(CONFIGS["phi3"]).rope_parameters["short_factor"]) == 8


def recipe(place: Path, **sections: Any) -> Any:
    CONFIGS["llama"].save_pretrained(place)
    plain = {"model": {"name_or_path": str(place), "init": "random"}, "data": {"train": "rows.jsonl"}, **sections}
    return load_recipe({"tokenizer": {"name_or_path": "byte"}, **plain}).recipe


def test_what_rounds_or_draws_is_left_out_and_said(tmp_path: Path) -> None:
    own = recipe(
        tmp_path / "own",
        adapter={"kind": "lora", "dropout": 0.5},
        train={"precision": "bf16", "global_batch_size": 32, "micro_batch_size": 4},
        optimizer={"kind": "adamw", "state": "8bit", "lr": 3e-3},
    )
    twin = make_twin(own, tmp_path / "twin")
    assert (twin.recipe.train.precision, twin.recipe.model.dtype, twin.recipe.adapter.dropout) == ("fp32", "fp32", 0.0)
    assert (twin.recipe.optimizer.lr, twin.accumulate) == (3e-3, 4)
    assert any("optimizer.state: 8bit is left out" in line for line in twin.assumptions)
    assert (tmp_path / "twin" / "config.json").is_file()


def test_names_of_layers_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    groups = [{"match": ["model.layers.31"], "lr": 1e-3}, {"match": ["norm", "model.layers.30"], "weight_decay": 0.0}]
    own = recipe(tmp_path / "own", optimizer={"kind": "adamw", "lr": 1e-5, "groups": groups})
    frozen = own.model_copy(update={"model": own.model.model_copy(update={"freeze": ("embed_tokens", "layers.30")})})
    twin = make_twin(frozen, tmp_path / "twin")
    assert twin.recipe.model.freeze == ("embed_tokens",)
    assert [group.match for group in twin.recipe.optimizer.groups] == [("norm",)]
    assert twin.recipe.optimizer.lr == RATE
    assert [line for line in twin.assumptions if "left out" in line] == [
        "model.freeze: layers.30 is left out",
        "optimizer.groups: model.layers.31 is left out",
        "optimizer.groups: model.layers.30 is left out",
    ]
    adapted = recipe(tmp_path / "own", adapter={"kind": "lora", "target_modules": ["layers.30.*_proj"]})
    assert make_twin(adapted, tmp_path / "twin").recipe.adapter.target_modules == "all-linear"


@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (2, 2), (3, 2), (64, 4)])
def test_micro_batches_of_a_step_are_the_recipes(rows: int, accumulate: int, tmp_path: Path) -> None:
    own = recipe(tmp_path / "own", train={"global_batch_size": rows, "micro_batch_size": 1})
    assert make_twin(own, tmp_path / "twin").accumulate == accumulate


def test_a_model_that_is_no_language_model_is_refused() -> None:
    from transformers import T5Config

    with pytest.raises(RecipeError, match="no causal language model"):
        shrunk(T5Config())


def test_rules_of_the_recipe_hold_where_the_small_model_leaves_out_what_they_look_at(tmp_path: Path) -> None:
    own = recipe(tmp_path / "own", prober={"modules": ["lm_head"], "steps": [1]})
    twin = make_twin(own, tmp_path / "twin")
    compiled = own.model_copy(update={"train": own.train.model_copy(update={"compile": True})})
    assert refused(twin, parse("fsdp2")) is None
    proof = refused(replace(twin, own=compiled), parse("fsdp2"))
    assert (
        proof is not None and proof.verdict == "refused" and "compiled layers cannot be looked into" in str(proof.cause)
    )


SECTIONS: list[MethodSection] = [
    SftMethod(), PretrainMethod(), DpoMethod(kind="dpo", reference="columns"),
    KtoMethod(kind="kto", reference="columns"),
]  # fmt: skip
MESHES = [{"shard": 2}, {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_processes_have_the_rows_of_one_between_them(
    section: MethodSection, accumulate: int, axes: dict[str, int]
) -> None:
    method = build_method(section)
    rows = ProofRows(section.examples, 100, accumulate, seed=1)
    alone = rows.step(0, method, Mesh())
    seen = []
    meshes = {(mesh := Mesh(axes, rank)).data_rank: mesh for rank in range(Mesh(axes).size)}
    for _, mesh in sorted(meshes.items()):
        step = rows.step(0, method, mesh)
        assert method.counts(step) == method.counts(alone)
        assert len(step.micro) == accumulate
        seen += [batch.input_ids for batch in step.micro]
    assert np.array_equal(np.concatenate(seen), np.concatenate([batch.input_ids for batch in alone.micro]))


def test_rows_are_uneven_and_come_again() -> None:
    rows, method = ProofRows(SftMethod().examples, 100, 1, seed=1), build_method(SftMethod())
    first, second, again = (rows.each(index, method).micro for index in (0, 1, STEPS_APART))
    assert len(first) == ROWS and max(len(batch.input_ids) for batch in first) == LONGEST
    assert len({len(batch.input_ids) for batch in first}) == 5
    assert len(first[0].lengths) == 1 and max(len(batch.lengths) for batch in first) > 2
    assert not np.array_equal(first[0].input_ids, second[0].input_ids)
    assert np.array_equal(first[0].input_ids, again[0].input_ids)
    assert first[0].trained_positions[0] > 0 and all(batch.input_ids.max() < 100 for batch in first)
