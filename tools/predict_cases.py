"""What predict_campaign.py compares: tiny models of many architectures, how each is trained, and on which rows."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
NAMED: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, SHAPE),
    "llama-tied": (LlamaConfig, {**SHAPE, "tie_word_embeddings": True}),
    "llama-wide": (LlamaConfig, {**SHAPE, "vocab_size": 8192, "hidden_size": 96, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**SHAPE, "head_dim": 8}),
    "gemma3": (Gemma3TextConfig, {**SHAPE, "head_dim": 8, "query_pre_attn_scalar": 8, **SLIDING}),
    "gpt2": (GPT2Config, {**GPT2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "qwen3-moe": (Qwen3MoeConfig, {**SHAPE, "head_dim": 8, **EXPERTS}),
    "mixtral": (MixtralConfig, {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
LONG, SHORT, TRAILING = ((40, 30, 20), (60, 28)), ((17, 17, 17, 3), (9, 50)), ((200,), (96, 60, 11), (128,))
"""Lengths of the documents of each microbatch of a step."""


@dataclass(frozen=True)
class Case:
    """A model, keys of the recipe, the microbatches of one process, and how many processes there are."""

    model: str
    keys: dict[str, Any] = field(default_factory=dict)
    micro: tuple[tuple[int, ...], ...] = LONG
    processes: int = 1

    @property
    def name(self) -> str:
        """The case in a line."""
        said = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.keys.items())
        return f"{self.model} x{self.processes} {[list(m) for m in self.micro]} {said}".strip()

    def config(self) -> PretrainedConfig:
        """The model's config."""
        if self.model in NAMED:
            kind, values = NAMED[self.model]
            return kind(**values)
        return small_config(self.model)


LORA, BF16, FULL = {"adapter.kind": "lora"}, {"train.precision": "bf16"}, {"train.gradient_checkpointing": "full"}
SELECTIVE = {"train.gradient_checkpointing": "selective"}
QUICK = (
    Case("llama"),
    Case("qwen3", {**LORA, **SELECTIVE}, SHORT),
    Case("gemma3", BF16, SHORT),
    Case("gpt2", FULL, TRAILING),
    Case("qwen3-moe", {"optimizer.kind": "muon"}),
)
"""Compared in the test suite as well."""


def cases(drawn: list[str]) -> list[Case]:
    """All that is compared, the architectures drawn at random included."""
    found = [*QUICK]
    for model in ("llama-tied", "qwen3", "gemma3", "gpt2", "mixtral"):
        found += [Case(model), Case(model, LORA), Case(model, BF16, SHORT), Case(model, {**LORA, **BF16, **FULL})]
        found += [Case(model, {**BF16, **SELECTIVE})]
        found += [Case(model, SELECTIVE, TRAILING)]
    for model in drawn:
        found += drawn_cases(model)
    optimizers: list[dict[str, Any]] = [{"optimizer.kind": "sgd", "optimizer.lr": 0.1}]
    optimizers += [{"optimizer.kind": kind} for kind in ("adafactor", "muon")]
    for processes in (1, 2, 4):
        found += [Case("qwen3", keys, LONG, processes) for keys in optimizers]
    found += [Case("llama-wide", keys) for keys in ({}, BF16, {**LORA, **BF16})]
    found += [Case("llama", {"adapter.kind": "dora"}), Case("llama", {"model.freeze": ["model.embed_tokens.*"]})]
    found += [Case("llama", {**FULL, "train.gradient_checkpointing_layers": "50%"})]
    spread: list[tuple[str, dict[str, Any]]] = [
        ("llama", {}), ("llama", LORA), ("gemma3", BF16), ("gpt2", FULL), ("qwen3-moe", SELECTIVE),
        ("qwen3", {"parallel.reshard_after_forward": False}), ("llama-tied", {"parallel.shard": "none"}),
    ]  # fmt: skip
    found += [Case(model, keys, LONG, processes) for processes in (2, 4) for model, keys in spread]
    return list({case.name: case for case in found}.values())


def drawn_cases(model: str) -> list[Case]:
    """How an architecture that was drawn is trained."""
    return [Case(model), Case(model, {**LORA, **BF16, **SELECTIVE}, SHORT)]


def draw(seed: int) -> Iterator[str]:
    """Causal language models of transformers in an order given by the seed, those with cases of their own left out."""
    own = {kind.model_type for kind, _ in NAMED.values()}
    types = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - own)
    random.Random(seed).shuffle(types)
    return iter(types)


def small_config(model_type: str) -> PretrainedConfig:
    """A config of a type of model with small numbers in the place of its own, under whatever names it has them.

    Raises what transformers raises where they do not go together.
    """
    plain = AutoConfig.for_model(model_type)
    text = plain.get_text_config()
    values = {key: value for key, value in {**SHAPE, **EXPERTS, **GPT2}.items() if hasattr(text, key)}
    values |= {key: 8 for key in ("head_dim", "sliding_window") if getattr(text, key, None) is not None}
    values |= {key: 0.0 for key in vars(text) if key.endswith(("_pdrop", "_dropout", "dropout")) and getattr(text, key)}
    if getattr(text, "layer_types", None):
        values["layer_types"] = list(text.layer_types[:2])
    if getattr(text, "num_local_experts", None):
        values["num_local_experts"] = 4
    return type(text)(**values)


def seed_of(case: Case) -> int:
    """A number of the case's own."""
    return zlib.crc32(case.name.encode())
