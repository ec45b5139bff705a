"""Tiny models of every family that llama.cpp is asked about, far from uniform, with a BPE tokenizer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from tuner.export.source import TRAINED

VOCAB = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 64, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": 96, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "rope_parameters": _YARN},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "olmo2": {},
    "phi3": {"original_max_position_embeddings": 512},
    "granite": {
        "logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2
    },
    "smollm3": {"num_hidden_layers": 4},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "gemma3_text": {**_GEMMA, "num_hidden_layers": 7},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64, "intermediate_size": 64,
        "rope_parameters": _YARN,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>")


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text() + " 2024 12345678 1,000,000" * 50
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=VOCAB - 10, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_tokens([AddedToken("<call>", normalized=False)])
    return str(tokenizer.to_str())


def write_tokenizer(directory: Path, family: str = "llama") -> None:
    """A byte-level BPE with a template and an added token; Phi 3's special tokens take the spaces after them."""
    tokenizer = Tokenizer.from_str(_trained())
    if family == "phi3":  # llama.cpp knows that of them by name
        names = ("<|im_start|>", "<|im_end|>", "</s>")
        tokenizer.add_special_tokens([AddedToken(name, rstrip=True, normalized=False) for name in names])
        tokenizer.add_tokens([AddedToken("<call>", rstrip=True, normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def write_model(directory: Path, family: str, change: Callable[[Any], None] = lambda model: None, **facts: Any) -> Path:
    """A Hugging Face directory of a family."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{**SHAPE, **FAMILIES[family], **facts}), dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise if "embed" in name else 1.2 * noise / parameter.shape[-1] ** 0.5)
    change(model)
    model.save_pretrained(directory)
    write_tokenizer(directory, family)
    return directory


def written(path: Path, kind: str, output: Path, keep: bool = False, **options: Any) -> Any:
    """The report of the file of a run or a directory."""
    from tuner.export.gguf import export, source

    return export.export_gguf(source.source_of(path, print, "newest", TRAINED, keep), kind, output, **options)


def keys_of(path: Path) -> dict[str, Any]:
    """What a file's keys say, as the library reads them."""
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
