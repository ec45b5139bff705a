"""A tiny config of every causal type that transformers knows: its own defaults with the sizes made small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 97
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_LAYERS = 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # experts
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "output_router_logits": True,  # the loss of routers is part of the loss then
    "router_aux_loss_coef": 0.1,
    "aux_loss_coef": 0.1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 8,  # scores that are equal, of heads that all give nothing, would be chosen among at will
    "index_topk": 6,  # fewer than documents have tokens
    # state
    "mamba_chunk_size": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    # older names
    "n_embd": 32,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "n_positions": 128,
    "n_ctx": 128,
    "d_model": 32,
    "emb_dim": 32,
    "ffn_dim": 48,
    "encoder_layers": 1,
    "decoder_layers": _LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "sliding_window": 8,
    "hidden_size_global": 64,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 32,
    # tokens
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""By the name of the key, where a config has it."""


def tiny_config(model_type: str) -> PretrainedConfig:
    """A config of the type of a few ten thousand parameters, without dropout.

    Raises what its class raises where transformers itself cannot make one.
    """
    return CONFIG_MAPPING[model_type](**_small(CONFIG_MAPPING[model_type]))


def decoder_config(model_type: str) -> PretrainedConfig:
    """A config of an encoder that makes it a decoder."""
    config = tiny_config(model_type)
    config.is_decoder = True
    return config


def write_random(config: PretrainedConfig, directory: Path) -> None:
    """Save a model of the config as transformers saves it, with weights of which each matters, sinks and biases too.

    Raises what its class raises, and ValueError where a row of ids gives no finite logits for each.
    """
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and "conv" not in name:
                _draw(name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn(buffer.shape) * 0.1)
        ids = torch.arange(3, 24)[None] % VOCAB
        logits = model(input_ids=ids, use_cache=False).logits
        if logits.shape[:2] != ids.shape or not logits.isfinite().all():
            raise ValueError(f"logits {list(logits.shape)} of {ids.shape[1]} tokens, or not finite")
    model.save_pretrained(directory)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)  # as it was given: a part of it may be what the model keeps


def _draw(name: str, parameter: torch.Tensor) -> None:
    """Matrices, those of experts too, large enough for attention to matter; all else away from its zeros and ones."""
    drawn = torch.randn(parameter.shape)
    if parameter.ndim > 1:
        parameter.copy_(drawn * min(0.2, parameter.shape[-1] ** -0.5))
    elif name.endswith("sinks"):
        parameter.copy_(drawn)
    else:
        parameter.add_(drawn * 0.1)


def _small(kind: type[PretrainedConfig]) -> dict[str, Any]:
    """The keys of a config class with small values; configs inside it likewise."""
    try:
        defaults = kind().to_dict()
    except (ValueError, StrictDataclassError):  # some defaults do not pass their own validation
        defaults = {}
    made = {key: value for key, value in _SIZES.items() if key in defaults or key in kind.attribute_map}
    made |= {key: 0.0 for key, value in defaults.items() if "drop" in key and isinstance(value, float)}
    made |= {key: {} for key, value in defaults.items() if key == "per_layer_config" and value}
    if defaults.get("kv_lora_rank") is not None and "num_key_value_heads" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(defaults.get(key), list):
            kinds = list(dict.fromkeys(defaults[key]))
            count = max(_LAYERS, 2 * len(kinds)) if key == "layer_types" else made.get("num_hidden_layers", _LAYERS)
            made |= {key: (kinds * count)[:count], "num_hidden_layers": count}
    for key, part in kind.sub_configs.items():
        if isinstance(defaults.get(key), dict):
            inner = CONFIG_MAPPING[defaults[key]["model_type"]] if part is AutoConfig else part
            made[key] = _small(inner) | ({"model_type": inner.model_type} if part is AutoConfig else {})
    return made | _OVERRIDES.get(kind.model_type, {})


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
_SHARED = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_SHORT = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
_SOME_WINDOWS = {
    "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2,
}  # fmt: skip
_INDEXER = {
    "indexer_budget": 6, "indexer_compress_ratio": 1, "indexer_head_dim": 8, "indexer_kv_heads": 1,
    "indexer_n_heads": 8, "ngram_vocab_size_base": 97, "split_ngram_parts": 2, "ple_embed_dim": 32,
}  # fmt: skip
_RELATIVE = {"d_rel": 4, "rel_extent": 10, "log_scaling_n_floor": 4}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 97},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "codegen": {"rotary_dim": 4},
    "ctrl": {"layer_norm_epsilon": 0.1, "num_hidden_layers": 1},  # with more layers the plain loop runs apart by itself
    "flint": {"mlp_only_layers": [0]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "doge": {"keep_window_size": 8, "output_router_logits": False},  # its term has a form of its own
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "index_topk": 2,
    },
    "dots3_note_text": {"head_dim": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64, "mamba_n_groups": 2},
    "gemma3n_text": _SHARED | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_assistant": {
        "text_config": _SIZES | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        | {"model_type": "gemma4_text"} | _SHORT
    },
    "gemma4_text": _SHARED | {"global_head_dim": 8, "rms_norm_eps": 0.01},  # below, the plain loop runs apart by itself
    "gemma4_unified_text": {"global_head_dim": 8, "use_bidirectional_attention": None},
    "gemma4_unified_assistant": {"text_config": _SIZES | {"model_type": "gemma4_unified_text"} | _SHORT},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "inkling_text": _RELATIVE,
    "inkling2_text": _RELATIVE,
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0], "floor_scale": 4, "attn_scale": 0.5},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "modernbert-decoder": {"local_attention": 16},
    "nemotron_h": {"chunk_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_n_heads": 2,
        "index_block_size": 4, "index_topk_blocks": 2,
    },
    "phimoe": {"sliding_window": 8},
    "qwen4_exp_text": _INDEXER,
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _SOME_WINDOWS),
    "recurrent_gemma": {"num_hidden_layers": 6, "attention_window_size": 8},
    "reformer": {
        "is_decoder": True, "axial_pos_embds": False, "num_buckets": 4,
        "local_attn_chunk_length": 64, "lsh_attn_chunk_length": 64, "attention_head_size": 8, "feed_forward_size": 48,
        "attn_layers": ["local", "local"],
    },
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97, "is_decoder": True},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"hidden_size": 128},  # transformers sizes its states right for multiples of 128 alone
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "youtu": {"pad_token_id": None},  # transformers makes that row zero whenever it loads, in a tied output layer too
    "zamba": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_head_dim": 16, "attention_hidden_size": 64, "num_key_value_heads": 4, "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "hybrid", "linear_attention"],
        "attention_head_dim": 16, "attention_hidden_size": 64, "num_key_value_heads": 4, "mamba_headdim": 8,
        "hybrid_layer_ids": [1], "n_mamba_heads": 8, "mamba_d_state": 16, "adapter_rank": 8, "num_query_groups": 4,
        "chunk_size": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

DECODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Encoders as their config comes, which `is_decoder: true` makes causal."""

FAMILIES = (
    "llama", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_text", "llama4_text", "deepseek_v3", "gemma4_text", "bloom",
    "mamba2", "falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "lfm2_moe",
)  # fmt: skip
"""One type of each family that people train, for what is too long for all of them."""
