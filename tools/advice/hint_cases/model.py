"""What models of transformers say of a recipe: their configs, layers, embeddings and losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools.advice.hint_cases.setup import LORA, RANDOM, check, config, dry, family, saved
from tools.advice.hint_place import Case, Change
from tools.advice.hint_words import RUN, Way

SMALL = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
EXPERTS = {**RANDOM, "model.config": {"vocab_size": 300}}
SEEN = {"logging.level": "warning"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
QUANTIZED = {"model.quantize": "nf4", **LORA}
GOOD = {RUN: ["mv good.json model/config.json"]}


def repaired(**values: Any) -> Change:
    """A config that is to be repaired, and how it is to be."""

    def change(place: Path) -> None:
        shutil.copy(place / "model/config.json", place / "good.json")
        config(**values)(place)

    return change


def quantised_from(place: Path) -> None:
    """Files of another format, and the model that they were made of."""
    shutil.copytree(place / "model", place / "plain")
    config(quantization_config={"quant_method": "gptq", "bits": 4})(place)


def train(site: str, recipe: dict[str, Any], *meant: Way, **more: Any) -> Case:
    """What a training finds as it begins."""
    return check(site, recipe, *meant, words="train r.yaml", **more)


CONFIGS = (
    check(
        "model/refusal.py:not_causal",
        RANDOM,
        {"model.config": {"is_decoder": True}},
        words="train r.yaml",
        change=saved("bert", **SMALL),
        reading={"model.config.is_decoder: true": "model.config: {is_decoder: true}"},
    ),
    train(
        "model/refusal.py:require_positions",
        {**RANDOM, "model.config": {"is_decoder": True}},
        {"data.max_length": 62},
        change=saved("roberta", pad_token_id=1, **SMALL),
        reading={"data.max_length to at most": "data.max_length:"},
    ),
    check(
        "model/vetting.py:require_known_losses",
        RANDOM,
        {"model.config": {"z_loss_coefficient": 0}},
        change=config(z_loss_coefficient=0.1),
        reading={"model.config.z_loss_coefficient: 0": "model.config: {z_loss_coefficient: 0}"},
    ),
    check(
        "model/vetting.py:_refuse: write",
        {},
        GOOD,
        change=repaired(dtype="nf5"),
        reading={"write bfloat16 or float32": "mv good.json model/config.json"},
    ),
    check(
        "model/vetting.py:_refuse: choose",
        {},
        {"model.quantize": "nf4", **LORA},
        change=config(quantization_config=NF4),
        reading={
            "nf4 or int8 is": "it is",
            "model.quantize: nf4 or int8": "write model.quantize: nf4, adapter.kind: lora and adapter.r: 4",
        },
    ),
    check(
        "model/vetting.py:_require_codes",
        {**QUANTIZED, "model.quantize": "int8"},
        {"model.quantize": "nf4"},
        change=config(quantization_config=NF4),
    ),
    check(
        "model/vetting.py:require_own_files",
        {},
        {RUN: ["rm -r model/adapter_config.json"]},
        words="train r.yaml",
        change=lambda place: (place / "model/adapter_config.json").write_text("{}"),
        reading={
            "take it away, or merge the adapter into its model: tuner export-hf": "rm -r model/adapter_config.json"
        },
    ),
    check(
        "model/quantize/published.py:",
        QUANTIZED,
        {"model.name_or_path": "plain", "model.quantize": "nf4"},
        change=quantised_from,
        reading={"name the model that it was quantised from": "write model.name_or_path: plain"},
    ),
)
def bytes_in_patches(place: Path) -> None:
    """The config of a BLT, whose attention to patches is bidirectional: what only the proof at the start finds."""
    from tools import causal_cases

    with patch.dict(causal_cases._SIZES, vocab_size=300):
        causal_cases.tiny_config("blt").save_pretrained(place / "model")


LAYERS = (
    train(
        "setup/model.py:_prove",
        {**RANDOM, "data.packing": True},
        {"data.packing": "auto"},
        change=bytes_in_patches,
        dear=True,
    ),
    check(
        "model/build.py:_overridden",
        RANDOM | {"tokenizer.name_or_path": "byte"},
        {"--model.config": None, "--model.init": "random"},
        words="config check r.yaml --model.config '{time_step_limit: [0, .inf]}'",
        change=family("falcon-h1"),
        reading={
            "write the number into the model's config.json": "leave out --model.config and write --model.init random"
        },
    ),
    dry(
        "model/router_loss.py:unasked_term",
        {**EXPERTS, **SEEN},
        {"model.router_aux_loss_coef": 0.001},
        {"model.router_aux_loss_coef": 0},
        change=family("mixtral"),
        reading={" to keep the experts evenly busy, or 0 for": " or model.router_aux_loss_coef: 0; for"},
    ),
    check(
        "model/tiles.py:apply_tiles",
        {**RANDOM, "train.tiled_mlp": True},
        {"train.tiled_mlp": False},
        words="train r.yaml",
        change=saved("opt", ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32),
    ),
    dry(
        "model/tokens.py:train_new_tokens",
        {**LORA, "adapter.target_modules": ["q_proj", "lm_head"], "tokenizer.add_tokens": ["<new>"]},
        {"adapter.target_modules": ["q_proj"], "adapter.modules_to_save": ["lm_head"]},
        reading={"move it to": "write adapter.target_modules: [q_proj] and"},
    ),
    dry(
        "model/adapter.py:_refuse_output_layer",
        {"adapter.kind": "dora", "adapter.r": 4, "adapter.target_modules": ["q_proj", "lm_head"]},
        {"adapter.kind": "lora"},
        {"adapter.target_modules": ["q_proj"]},
        reading={"leave lm_head out of adapter.target_modules": "write adapter.target_modules: [q_proj]"},
    ),
    check(
        "model/adapter.py:add_lora",
        {**LORA, **SEEN, "adapter.target_modules": ["q_proj", "lm_head"]},
        {RUN: ["train r.yaml", "export-hf runs/r --adapter keep"]},
        words="train r.yaml",
        instead=True,
        reading={
            "adapter.target_modules: lm_head": "lm_head",
            " alone": "",
            "is exported with": "tuner train r.yaml and tuner export-hf runs/r",
        },
        dear=True,
    ),
    train(
        "model/adapter.py:require_used",
        {**RANDOM, **LORA},
        {"adapter.kind": "none"},
        change=saved(
            "reformer",
            is_decoder=True,
            axial_pos_embds=False,
            feed_forward_size=48,
            num_attention_heads=2,
            attention_head_size=16,
        ),
        dear=True,
    ),
)
CASES = (*CONFIGS, *LAYERS)
