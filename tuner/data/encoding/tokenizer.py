"""Text to token ids and back, with the chat template, without importing transformers or torch."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from tuner.config.chat_templates import CHAT_TEMPLATES
from tuner.data.encoding.template import (
    NO_VARIABLES,
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    ChatTemplate,
    Message,
    compiled,
    named_templates,
    unless_refused,
)
from tuner.data.encoding.tokenizer_json import ByteTable, Unproven, parse_json, read_tokenizer
from tuner.errors import DataError
from tuner.runtime.files import write_atomic
from tuner.runtime.turn_end import ChatConvention, turn_end

_OTHERS = ", ".join(name for name in CHAT_TEMPLATES if name != "chatml")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Encoded:
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
        self,
        files: Mapping[str, bytes],
        chat_template: str | None = None,
        model_eos_ids: Sequence[int] = (),
        now: datetime | None = None,
        new_ids: range = range(0),
        loaded_as: dict[str, Any] | None = None,
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
            self.files[TEMPLATE_FILE] = chat_template.encode()
            self.files.pop(TOOL_TEMPLATE_FILE, None)
        self._now = now or datetime.now()  # one for all processes of a preparation, whenever they render
        self._origin = origin
        where = f"{origin}: the chat template" if origin else "the chat template"
        self._templates = compiled(named_templates(self.files, config), self.special_tokens, self._now, where)
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
        end = turn_end(ChatConvention(partial(unless_refused, self.render), self.specials, ends, begin))
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

    def template_for(self, tools: object) -> ChatTemplate:
        """The template of a conversation with `tools`, or without; as transformers chooses. DataError."""
        own = self._templates.get("tool_use") if tools else None
        return self.template if own is None else own

    @property
    def template(self) -> ChatTemplate:
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
        self, messages: Sequence[Message], add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] = NO_VARIABLES,
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
    added = np.array(encoding.special_tokens_mask, dtype=bool)
    body = np.flatnonzero(~added)
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
    tokens: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or special_map.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
