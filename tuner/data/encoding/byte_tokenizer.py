"""The built-in byte tokenizer: 256 bytes and three special tokens, written as a complete Hugging Face tokenizer."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTE_BOS, BYTE_EOS, BYTE_PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Ids 256, 257 and 258; a byte's id is its value."""

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|bos|>' + message['role'] + '\\n' + message['content'] + '<|eos|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the files, by name, of the byte tokenizer's directory; `AutoTokenizer` loads them."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without the regex a text is one word; there are no merges to make, so its bytes are its tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(name, special=True, normalized=False) for name in (BYTE_BOS, BYTE_EOS, BYTE_PAD)]
    tokenizer.add_special_tokens(specials)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BYTE_BOS,
        "eos_token": BYTE_EOS,
        "pad_token": BYTE_PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        "chat_template.jinja": BYTE_CHAT_TEMPLATE.encode(),
    }


def byte_symbols() -> list[str]:
    """The printable character that GPT-2's byte-level alphabet gives each byte, by byte value."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
