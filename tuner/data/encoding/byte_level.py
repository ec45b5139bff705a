"""Which bytes each token of a byte-level tokenizer stands for."""

import json
import unicodedata
from itertools import islice
from typing import Any

import numpy as np
import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_VOCABULARY_STEP = 61


class Unproven(Exception):
    """Why a faster way is not taken for a tokenizer."""


class ByteTable:
    """The bytes that each token stands for, for byte-level tokenizers that keep every byte of a text."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises Unproven where the tokenizer is of another kind."""
        spec = orjson.loads(tokenizer_json)
        _require_byte_level(spec)
        self.normal_form = (spec["normalizer"] or {}).get("type")
        added = {token["content"]: int(token["id"]) for token in spec["added_tokens"]}
        vocabulary: dict[str, int] = spec["model"]["vocab"]
        twice = [vocabulary.pop(token) for token in added if token in vocabulary]
        ids = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
        size = 1 + int(max(ids.max(initial=-1), *added.values(), -1))
        missing = [symbol for symbol in byte_symbols() if symbol not in vocabulary]
        self.size = size
        """Ids from here on stand for bytes that the tokenizer does not know and leaves out."""
        self.model_size = 1 + int(max(ids.max(initial=-1), *twice, -1))
        """One more than the largest id of the tokenizer without its added tokens."""
        self.lengths = np.zeros(size + len(missing), dtype=np.int32)
        self.lengths[size:] = 1
        self.lengths[ids] = np.fromiter(map(len, vocabulary), np.int32, len(vocabulary))
        for token, i in added.items():
            self.lengths[i] = len(token.encode())
        self.pre_tokenizer: dict[str, Any] = spec["pre_tokenizer"]
        self.added = added
        """Added tokens, which cut a text wherever they stand, and their ids."""
        self._missing = {symbol: size + k for k, symbol in enumerate(missing)}
        self._words = list(islice(vocabulary, 0, None, _VOCABULARY_STEP))

    def accepts(self, text: str) -> bool:
        """Whether the tokenizer would leave the characters of `text` as they are."""
        return self.normal_form is None or text.isascii() or unicodedata.is_normalized("NFC", text)

    def complete_json(self, original: bytes) -> bytes:
        """Return the tokenizer.json with an id for every byte."""
        if not self._missing:
            return original
        spec = orjson.loads(original)  # read again: kept, it would be a hundred megabytes of objects
        spec["model"]["vocab"].update(self._missing)
        return orjson.dumps(spec)

    def words(self) -> list[str]:
        """A share of the vocabulary as text."""
        known = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
        raw = (bytes(known[c] for c in word if c in known) for word in self._words)
        return [word.decode("utf-8", "ignore") for word in raw]


def _require_byte_level(spec: dict[str, Any]) -> None:
    model, normalizer = spec["model"], spec.get("normalizer") or {}
    before = spec.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    if model.get("type") != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise Unproven("the tokenizer is not byte-level BPE")
    if any(step.get("type") == "ByteLevel" and step.get("add_prefix_space") for step in steps):
        raise Unproven("the tokenizer adds a space before a text")
    if any(step.get("behavior") == "Removed" for step in steps):
        raise Unproven("the tokenizer removes characters")
    odd = [key for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]
    if odd or model.get("byte_fallback") or normalizer.get("type") not in (None, "NFC"):
        raise Unproven(f"the tokenizer has {', '.join(odd) or 'a normalizer or byte fallback'}")
    for token in spec["added_tokens"]:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise Unproven(f"the added token {token['content']} takes its surroundings with it")


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
