"""What of a config follows the recipe's values, and what stays as the base has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BioGptConfig, Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config, XLNetConfig

from tests.fixtures import tables
from tuner.errors import RecipeError
from tuner.model.blocks import apply_recompute, compile_blocks
from tuner.model.build import ModelSpec, meta_model, model_config, position_limit
from tuner.model.documents import Padding
from tuner.model.float8 import Float8Layers
from tuner.model.root import CausalLM
from tuner.model.tiles import apply_tiles

LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 30}


def changed(directory: Path, config: PretrainedConfig, given: dict[str, Any]) -> PretrainedConfig:
    config.save_pretrained(directory)
    return model_config(ModelSpec(str(directory), random_init=True, config_overrides=given))


@pytest.mark.parametrize(
    ("own", "given", "heads"),
    tables.cases(__file__, "heads_follow_from_the_new_numbers_where_they_followed_from_the_old"),
)
def test_heads_follow_from_the_new_numbers_where_they_followed_from_the_old(
    tmp_path: Path, own: dict[str, Any], given: dict[str, Any], heads: list[int]
) -> None:
    config = changed(tmp_path, LlamaConfig(**LLAMA, **own), given)
    assert (config.num_attention_heads, config.head_dim, config.num_key_value_heads) == tuple(heads)


def test_heads_that_a_class_or_a_base_makes_wider_stay(tmp_path: Path) -> None:
    sizes = LLAMA | {"num_key_value_heads": 2}
    assert changed(tmp_path / "qwen3", Qwen3Config(**sizes, head_dim=128), {"hidden_size": 32}).head_dim == 128
    assert changed(tmp_path / "gemma2", Gemma2Config(**sizes, head_dim=16), {"hidden_size": 128}).head_dim == 32


def test_a_class_with_names_of_its_own_is_changed_by_either(tmp_path: Path) -> None:
    small = GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=30)
    for given in ({"n_embd": 32}, {"hidden_size": 32}):
        config = changed(tmp_path, small, given)
        assert (config.n_embd, config.hidden_size, config.n_head) == (32, 32, 4)


def test_a_class_without_named_layers_is_refused_for_what_was_asked() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}
    root = CausalLM(meta_model(BioGptConfig(**sizes, num_hidden_layers=1), torch.float32))
    for key, ask in {
        "train.compile": lambda: compile_blocks(root, Padding(8, 8)),
        "train.gradient_checkpointing": lambda: apply_recompute(root, "full", None),
        "train.tiled_mlp": lambda: apply_tiles(root),
        "train.precision: fp8": lambda: Float8Layers.of(root.model),
    }.items():
        with pytest.raises(RecipeError, match=f"BioGptForCausalLM names no decoder layers, which {key} needs"):
            ask()


def test_a_model_may_have_no_limit_of_positions() -> None:
    assert XLNetConfig().max_position_embeddings == -1
    found = [position_limit(config) for config in (XLNetConfig(), GPT2Config(n_positions=64), LlamaConfig(**LLAMA))]
    assert found == [None, 64, 2048]
