"""Tiny random models of many architectures, for tests."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tuner.model.wrap import Wrapper, wrappers_of

VOCAB = 97
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
SHAPE: dict[str, Any] = {
    **TOKENS, "pad_token_id": 0, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}
_GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
FAMILIES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, SHAPE),
    "qwen3": (transformers.Qwen3Config, SHAPE | {"head_dim": 8}),
    "gemma3": (transformers.Gemma3TextConfig, SHAPE | _GEMMA | _WINDOWS),
    "mistral": (transformers.MistralConfig, SHAPE | {"sliding_window": 8}),
    "phi": (transformers.PhiConfig, SHAPE | {"partial_rotary_factor": 0.5}),
    "phi3": (transformers.Phi3Config, SHAPE | {"original_max_position_embeddings": 128}),
    "gpt2": (transformers.GPT2Config, TOKENS | _GPT2 | _NO_DROPOUT),
    "olmo2": (transformers.Olmo2Config, SHAPE),
    "mixtral": (transformers.MixtralConfig, SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, SHAPE | {"head_dim": 8} | _EXPERTS),
}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
HYBRIDS: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "falcon-h1": (transformers.FalconH1Config, SHAPE | _MAMBA | {"head_dim": 8}),
}
"""Layers with attention and a Mamba mixer side by side."""
TINY = ("llama", "llama-tied", "qwen3", "gpt2", "gemma3", "mistral")


def family_config(family: str, tied: bool) -> transformers.PretrainedConfig:
    """A config of about 20 thousand parameters; sliding windows are shorter than the test documents."""
    kind, shape = (FAMILIES | HYBRIDS)[family]
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.model_type]]
    return kind(**shape, tie_word_embeddings=tied, architectures=names)


def tiny_config(kind: str) -> transformers.PretrainedConfig:
    """The config of one of `TINY`; where the name does not say it, tied as that family's small models are."""
    return family_config(kind.removesuffix("-tied"), tied=kind not in ("llama", "mistral"))


def family_model(family: str, tied: bool) -> transformers.PreTrainedModel:
    """A float32 model whose logits spread as a trained model's do, the same at each call."""
    torch.manual_seed(1)
    config = family_config(family, tied)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.train(False)
    return model


def taken(apply: Callable[[nn.Module], None], model: nn.Module) -> int:
    """How many modules of a model a kernel is given to."""
    apply(model)
    return sum(Wrapper.KERNEL in wrappers_of(module) for module in model.modules())
