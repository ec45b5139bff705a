"""Tiny random configs of several architectures, for tests."""

from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config

VOCAB = 97
_SHAPE = {
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
TINY = ("llama", "llama-tied", "qwen3", "gpt2", "gemma3", "mistral")


def tiny_config(kind: str) -> PretrainedConfig:
    """A config of about 20 thousand parameters; sliding windows are shorter than the test documents."""
    if kind == "llama":
        return LlamaConfig(**_SHAPE, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    if kind == "llama-tied":
        return LlamaConfig(**_SHAPE, tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    if kind == "qwen3":
        return Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"])
    if kind == "gemma3":
        return Gemma3TextConfig(
            **_SHAPE, head_dim=8, sliding_window=8, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"], architectures=["Gemma3ForCausalLM"],
        )  # fmt: skip
    if kind == "mistral":
        return MistralConfig(**_SHAPE, sliding_window=8, architectures=["MistralForCausalLM"])
    return GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
