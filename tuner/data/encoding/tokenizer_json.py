"""What a tokenizer.json holds: the bytes that byte-level tokens stand for, the built-in tokenizer, and tokens added.

The built-in one is 256 bytes and three special tokens, written as a complete Hugging Face tokenizer. New tokens are
appended to a vocabulary, and loaded by transformers like those it had.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import orjson
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tuner.config.recipe import AddedToken
from tuner.errors import DataError, RecipeError

_VOCABULARY_STEP = 61
BYTE_BOS, BYTE_EOS, BYTE_PAD = "<|bos|>", "<|eos|>", "<|pad|>"
"""Ids 256, 257 and 258; a byte's id is its value."""
BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|bos|>' + message['role'] + '\\n' + message['content'] + '<|eos|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bos|>assistant\\n' }}{% endif %}"
)
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FACTS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


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


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the files, by name, of the byte tokenizer's directory; `AutoTokenizer` loads them."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Without the regex a text is one word; there are no merges to make, so its bytes are its tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [tokenizers.AddedToken(name, special=True, normalized=False) for name in (BYTE_BOS, BYTE_EOS, BYTE_PAD)]
    tokenizer.add_special_tokens(specials)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BYTE_BOS, "eos_token": BYTE_EOS,
        "pad_token": BYTE_PAD, "clean_up_tokenization_spaces": False, "model_max_length": 1_000_000_000,
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


def with_tokens(files: Mapping[str, bytes], tokens: Sequence[AddedToken]) -> tuple[dict[str, bytes], range]:
    """A tokenizer directory's files with these tokens, and their ids, which follow on the largest there was.

    They are found in a text as it is, before anything else is made of it. Raises RecipeError for a token that the
    tokenizer has.
    """
    before, spec, config = _opened(files)
    first = 1 + max(before.get_vocab(with_added_tokens=True).values(), default=-1)
    for number, token in enumerate(tokens):
        if (there := before.token_to_id(token.token)) is not None:
            raise RecipeError(
                f"tokenizer.add_tokens: {token.token!r} is a token of the tokenizer already (id {there})",
                hint="remove it from the list",
            )
        facts = {"content": token.token, **_FACTS, "special": token.special}
        spec.setdefault("added_tokens", []).append({"id": first + number, **facts})
        if "added_tokens_decoder" in config:  # some of transformers' classes read added tokens from there alone
            config["added_tokens_decoder"][str(first + number)] = facts
    _name_special(config, [token.token for token in tokens if token.special])
    changed = {"tokenizer.json": _bytes(spec), "tokenizer_config.json": _bytes(config)}
    added, ids = {**files, **changed}, range(first, first + len(tokens))
    require_ids(added, tokens, ids)
    return added, ids


def with_control_tokens(
    files: dict[str, bytes], wanted: Sequence[AddedToken], controls: Sequence[str]
) -> tuple[dict[str, bytes], list[AddedToken]]:
    """The files in which each of `controls` that the tokenizer has is a control token; and the tokens to add.

    These are those that are wanted, then the `controls` that are not there. Some tokenizers have such a token as an
    ordinary one, which would neither end a turn nor be refused in users' text. The very same files come back where none
    is. Raises DataError.
    """
    before, spec, config = _opened(files)
    given = {item.token for item in wanted}
    lacking = [token for token in controls if token not in given and before.token_to_id(token) is None]
    added = {int(entry["id"]): entry for entry in spec.get("added_tokens") or []}
    ids = ((token, before.token_to_id(token)) for token in controls)
    there = {token: number for token, number in ids if number is not None}
    ordinary = {token: number for token, number in there.items() if not added.get(number, {}).get("special")}
    for token, number in ordinary.items():
        facts = {**_FACTS, **added.get(number, {}), "content": token, "special": True}
        facts.pop("id", None)
        added[number] = {"id": number, **facts}
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"][str(number)] = facts
    new = [*wanted, *(AddedToken(token=token, special=True) for token in lacking)]
    if not ordinary:
        return files, new
    spec["added_tokens"] = [added[number] for number in sorted(added)]
    listed = [name for key in _EXTRA for name in config.get(key) or () if isinstance(name, str)]
    _name_special(config, [token for token in ordinary if token not in listed])
    return {**files, "tokenizer.json": _bytes(spec), "tokenizer_config.json": _bytes(config)}, new


def require_ids(files: Mapping[str, bytes], tokens: Sequence[AddedToken], ids: range) -> None:
    """Check that a tokenizer gives added tokens these ids. Raises DataError."""
    after = Tokenizer.from_str(files["tokenizer.json"].decode())
    if [after.token_to_id(token.token) for token in tokens] != list(ids):
        raise DataError("tokenizer.add_tokens: there are gaps in the tokenizer's ids, so that it cannot be added to")


def _name_special(config: dict[str, Any], tokens: Sequence[str]) -> None:
    """Put special tokens on the config's list of those without a role, or among those with a name of their own."""
    if not tokens:
        return
    key = next((name for name in _EXTRA if isinstance(config.get(name), list)), _EXTRA[1])
    there = config.get(key)
    if isinstance(there, dict):
        config[key] = {**there, **{f"added_{number}_token": token for number, token in enumerate(tokens, len(there))}}
    else:
        config[key] = [*(there or []), *tokens]


def _opened(files: Mapping[str, bytes]) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    """A tokenizer, its tokenizer.json and its tokenizer_config.json. DataError."""
    return read_tokenizer(files), parse_json(files, "tokenizer.json"), parse_json(files, "tokenizer_config.json")


def read_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of a directory's files, as the library reads it. DataError."""
    try:
        return Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"tokenizer.json: {error}") from error


def parse_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in one of the files, empty where it is not there. DataError."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{name}: not an object")
    return value


def _bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
