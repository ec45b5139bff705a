"""Text to token ids and back, with the chat template, without importing transformers or torch.

And what a tokenizer.json holds: the bytes that byte-level tokens stand for, the built-in tokenizer, and tokens added.
The built-in one is 256 bytes and three special tokens, written as a complete Hugging Face tokenizer. New tokens are
appended to a vocabulary, and loaded by transformers like those it had.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.config.recipe import AddedToken
from tuner.data.encoding import template as templates
from tuner.errors import DataError, RecipeError
from tuner.runtime.files import write_atomic
from tuner.runtime.turn_end import ChatConvention, turn_end

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


def byte_files() -> dict[str, bytes]:
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
    ordinary = {token: n for token, n in ids if n is not None and not added.get(n, {}).get("special")}
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


_OTHERS = ", ".join(name for name in CHAT_TEMPLATES if name != "chatml")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Encoded(NamedTuple):
    """Token ids of a text and the characters each covers: int64[n] ids, starts and stops (exclusive)."""

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64] | npt.NDArray[np.int32]
    stops: npt.NDArray[np.int64] | npt.NDArray[np.int32]


class TextTokenizer:
    """A tokenizer and its chat template; encodes the ids that transformers' tokenizer would.

    Its vocabulary is parsed when it is first asked for, which takes a third of a second for a large one: whoever only
    hands the tokenizer on does without. DataError then, where tokenizer.json is none.
    """

    def __init__(
        self, files: Mapping[str, bytes], chat_template: str | None = None, model_eos_ids: Sequence[int] = (),
        now: datetime | None = None, new_ids: range = range(0), loaded_as: dict[str, Any] | None = None,
        origin: str = "",
    ) -> None:
        """Build from a tokenizer directory's files by name.

        `chat_template` replaces the directory's own; `model_eos_ids` are further ids that end a turn, `now` the
        current time for a template, `new_ids` those of tokens that the recipe added to the files, `loaded_as` how
        transformers loads them, as a manifest holds it, where it was asked, `origin` the file, directory or key that
        errors of the template name. DataError.
        """
        self.loaded_as = loaded_as
        self.files = dict(files)
        """The tokenizer directory's, by name, with the template in use."""
        self.new_ids = new_ids
        config = parse_json(files, "tokenizer_config.json")
        self.special_tokens = declared_special_tokens(config, parse_json(files, "special_tokens_map.json"))
        if chat_template is not None:
            self.files[templates.TEMPLATE_FILE] = chat_template.encode()
            self.files.pop(templates.TOOL_TEMPLATE_FILE, None)
        self._now = now or datetime.now()  # one for all processes of a preparation, whenever they render
        self._origin = origin
        where = f"{origin}: the chat template" if origin else "the chat template"
        sources = templates.named_templates(self.files, config)
        self._templates = templates.compiled(sources, self.special_tokens, self._now, where)
        self._model_eos_ids = tuple(model_eos_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers get the tokenizer once, at their start; the template in use is among the files.
        return TextTokenizer, (self.files, None, self._model_eos_ids, self._now, self.new_ids, None, self._origin)

    @cached_property
    def text_prefix(self) -> list[int]:
        """Ids that the tokenizer puts before a text."""
        return self._parsed[1]

    @cached_property
    def text_suffix(self) -> list[int]:
        """Ids that the tokenizer puts after a text."""
        return self._parsed[2]

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a document or a turn: the tokenizer's, the model's, the template's."""
        ids = [] if self.eos_id is None else [self.eos_id]
        ids += [i for i in self._model_eos_ids if i not in ids and self._backend.id_to_token(i) is not None]
        if not self.has_template:
            return tuple(ids)
        ends = {str(self._backend.id_to_token(i)) for i in ids}
        begin = self.special_tokens.get("bos_token")
        end = turn_end(ChatConvention(partial(templates.unless_refused, self.render), self.specials, ends, begin))
        found = None if end is None else self._backend.token_to_id(end)
        return tuple(ids) if found is None else (*ids, found)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        table = self._table
        if isinstance(table, Unproven):
            return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        # The library would copy its vocabulary, which takes longer than all else that is asked of it at start.
        return max(table.model_size, 1 + max(self._backend.get_added_tokens_decoder(), default=-1))

    @property
    def byte_table(self) -> ByteTable:
        """The bytes that each token stands for, read once. Raises Unproven where the tokenizer is of another kind."""
        if isinstance(self._table, Unproven):
            raise Unproven(*self._table.args)
        return self._table

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end token, appended to plain documents."""
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    @property
    def has_template(self) -> bool:
        """Whether messages can be rendered."""
        return "default" in self._templates

    def template_for(self, tools: object) -> templates.ChatTemplate:
        """The template of a conversation with `tools`, or without; as transformers chooses. DataError."""
        own = self._templates.get("tool_use") if tools else None
        return self.template if own is None else own

    @property
    def template(self) -> templates.ChatTemplate:
        """The chat template; DataError where there is none."""
        template = self._templates.get("default")
        if template is None:
            raise DataError(
                "the tokenizer has no chat template, and the rows are messages",
                hint=f"write tokenizer.chat_template: chatml (or {_OTHERS}, or the path of a jinja file); "
                "or use prompt and completion rows",
            )
        return template

    @cached_property
    def hash(self) -> str:
        """SHA-256 over everything that decides the ids of a text."""
        digest = hashlib.sha256(self.files["tokenizer.json"])
        frame = [sorted(self.special_tokens.items()), self.text_prefix, self.text_suffix]
        digest.update(json.dumps(frame).encode())
        return digest.hexdigest()

    @cached_property
    def template_hash(self) -> str | None:
        """SHA-256 of the chat template's source; of both sources where there is another for tools."""
        sources = [self._templates[name].source for name in sorted(self._templates)]
        text = sources[0] if list(self._templates) == ["default"] else json.dumps(sources)
        return hashlib.sha256(text.encode()).hexdigest() if sources else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def added_tokens_from(self, first: int) -> list[str]:
        """Tokens that are found in a text before anything else is made of it, by id, of the ids `first` and above."""
        added = sorted(self._backend.get_added_tokens_decoder().items())
        return [token.content for i, token in added if i >= first]

    def token(self, token_id: int) -> str | None:
        """The token of an id, as the tokenizer's files write it; None for an id that has none."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids; with `add_special_tokens`, those that the tokenizer puts around a text too."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [*self.text_prefix, *ids, *self.text_suffix] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode many texts at once, without added special tokens, with character spans."""
        return [_encoded(encoding) for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    def encode_ids(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode many texts at once to ids alone, without added special tokens; faster than with spans."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_escaped(self, text: str) -> Encoded:
        """Encode a text in which control tokens, where they are written out, are ordinary characters."""
        return _encoded(self._escaping.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def render(
        self, messages: Sequence[templates.Message], add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] = templates.NO_VARIABLES,
    ) -> str:
        """Render messages with the chat template; DataError where there is none or it refuses them."""
        return self.template_for(tools).render(messages, add_generation_prompt, tools, variables)

    def find_special(self, text: str) -> tuple[str, int] | None:
        """Return the first control token written out in `text` and its character, or None."""
        found = self._special_pattern.search(text)
        return (found.group(), found.start()) if found else None

    def change_specials(self, text: str, change: Callable[[str], str]) -> str:
        """Replace every control token written out in `text`."""
        return self._special_pattern.sub(lambda found: change(found[0]), text)

    def specials(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [start, stop) of every control token in `text`."""
        return [found.span() for found in self._special_pattern.finditer(text)]

    def end_of_turn(self, text: str, start: int, stop: int) -> int | None:
        """Return where the first end-of-turn token within text[start:stop] ends, or None.

        Some, such as Phi-3's, take the white space that follows with them.
        """
        found = self._end_pattern.search(text, start, stop)
        return None if found is None else found.end()

    def last_special(self, text: str, start: int, stop: int) -> tuple[int, int] | None:
        """Return the characters of the last control token within text[start:stop], or None."""
        last = None
        for found in self._special_pattern.finditer(text, start, stop):
            last = found.span()
        return last

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, with the template in use, so that `AutoTokenizer` loads them."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            write_atomic(directory / name, content)

    @property
    def _backend(self) -> Tokenizer:
        return self._parsed[0]

    @cached_property
    def _parsed(self) -> tuple[Tokenizer, list[int], list[int]]:
        """The tokenizer without its frame, and the ids of that: before and after a text."""
        backend = read_tokenizer(self.files)
        backend.no_truncation()
        backend.no_padding()
        prefix, suffix = _text_frame(backend)
        # Without a post-processor the character offsets are the tokens' own, spaces included, and the ids are the same.
        backend.post_processor = None
        return backend, prefix, suffix

    @cached_property
    def _table(self) -> ByteTable | Unproven:
        try:
            return ByteTable(self.files["tokenizer.json"])
        except Unproven as error:
            return error.with_traceback(None)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return _pattern([t.content for t in self._backend.get_added_tokens_decoder().values() if t.special])

    @cached_property
    def _end_pattern(self) -> re.Pattern[str]:
        added = self._backend.get_added_tokens_decoder()
        ends = [added[i] for i in self.eos_ids if i in added]
        return _pattern([end.content for end in ends], {end.content for end in ends if end.rstrip})

    @cached_property
    def _escaping(self) -> Tokenizer:
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def _text_frame(backend: Tokenizer) -> tuple[list[int], list[int]]:
    # tokenizer.json decides alone: transformers too leaves add_bos_token and add_eos_token unread next to one.
    encoding = backend.encode("a", add_special_tokens=True)
    body = np.flatnonzero(~np.array(encoding.special_tokens_mask, dtype=bool))
    if len(body) == 0:
        return [], []
    return encoding.ids[: int(body[0])], encoding.ids[int(body[-1]) + 1 :]


def _pattern(words: Sequence[str], with_blanks: Set[str] = frozenset()) -> re.Pattern[str]:
    """What finds any of the words, the longest first, and white space after those that take it; nothing of none."""
    longest_first = sorted(words, key=len, reverse=True)
    found = [re.escape(word) + (r"\s*" if word in with_blanks else "") for word in longest_first]
    return re.compile("|".join(found) or r"(?!)")


def _encoded(encoding: Encoding) -> Encoded:
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return Encoded(np.array(encoding.ids, dtype=np.int64), spans[:, 0], spans[:, 1])


def declared_special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens by their names, such as `bos_token`, as tokenizer_config.json or the older file names them."""
    given = ((name, config.get(name) or special_map.get(name)) for name in SPECIAL_NAMES)
    named = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in given)
    return {name: token for name, token in named if isinstance(token, str)}
