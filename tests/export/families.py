"""Tiny random models of many architectures, tied and untied, whose logits spread as a trained model's do."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.model.tiny import VOCAB

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "phi": (PhiConfig, {"partial_rotary_factor": 0.5}),
    "phi3": (Phi3Config, {"original_max_position_embeddings": 128}),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}),
    "olmo2": (Olmo2Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (Qwen3MoeConfig, {"head_dim": 8, **_EXPERTS}),
}


def family_model(family: str, tied: bool) -> PreTrainedModel:
    """A float32 model of some twenty thousand parameters, the same at each call."""
    kind, more = FAMILIES[family]
    shape = {key: value for key, value in _SHAPE.items() if family != "gpt2" or not key.startswith(("hidden", "num_"))}
    shape.pop("intermediate_size") if family == "gpt2" else None
    config = kind(**(shape | more), tie_word_embeddings=tied)
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.train(False)
    return model
