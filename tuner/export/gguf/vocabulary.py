"""A tokenizer as a GGUF file holds it: tokens, how text is cut and merged, where it begins and where a turn ends."""

import json
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from tuner.data.encoding.template import LoadedTemplates, unless_refused
from tuner.errors import RecipeError, TunerError
from tuner.export.gguf.tables import table

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_A_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_PHI = re.compile("phi-?3", re.IGNORECASE)
_TRIM = re.compile(r"\|\s*trim\b|\.[lr]?strip\(\)")
_NEVER = -1e9
"""The score of a token that no merge makes."""


def vocabulary(tokenizer: Any, size: int, ends: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    """The keys of a tokenizer for a model of ``size`` embeddings whose turns end with one of ``ends``.

    ``texts`` are what the way of cutting is found on. Raises RecipeError where llama.cpp has no such tokenizer.
    """
    if not getattr(tokenizer, "backend_tokenizer", None):
        raise RecipeError("a slow tokenizer, of Python alone: no GGUF of it is proven")
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    model = facts["model"]
    if model["type"] != "BPE":
        raise RecipeError(f"a tokenizer of kind {model['type']}: no GGUF of it is proven, of BPE alone")
    if not model["merges"]:
        raise RecipeError("a tokenizer without merges, such as one of bytes: llama.cpp takes none")
    if len(tokenizer) > size:
        raise RecipeError(f"the tokenizer has {len(tokenizer):,} tokens, the model {size:,} embeddings")
    by_id = {number: token for token, number in model["vocab"].items()}
    tokens = [by_id.get(number, f"[UNUSED{number}]") for number in range(size)]
    types = [_NORMAL if number in by_id else _UNUSED for number in range(size)]
    keys: dict[str, Any] = {}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        scores = {first + second: -float(rank) for rank, (first, second) in reversed(list(enumerate(merges)))}
        keys["tokenizer.ggml.model"] = "llama"
        keys["tokenizer.ggml.scores"] = [scores.get(token, _NEVER) for token in tokens]
        keys["tokenizer.ggml.add_space_prefix"] = tokenizer.tokenize("a")[0].startswith("▁")
        types = [_BYTE if _A_BYTE.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
    else:
        keys["tokenizer.ggml.model"] = "gpt2"
        keys["tokenizer.ggml.pre"] = pre_tokenizer(facts, texts)
        keys["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    for added in facts["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if model.get("unk_token") and model.get("byte_fallback"):
        types[model["vocab"][model["unk_token"]]] = _UNKNOWN
    return keys | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types} | _special(tokenizer, ends)


def _special(tokenizer: Any, ends: Sequence[int]) -> dict[str, Any]:
    """Ids of special tokens, what frames a text, and the template."""
    stops = list(dict.fromkeys(ends or [tokenizer.eos_token_id]))
    if len(stops) > 3:  # noqa: PLR2004 - the keys below
        raise RecipeError(f"generation ends at {len(stops)} tokens, and a GGUF file names three")
    ids = {"bos": tokenizer.bos_token_id, "unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    ids |= dict(zip(("eos", "eot", "eom"), stops, strict=False))
    before, after = frame_of(tokenizer)
    known = {name: number for name, number in ids.items() if number is not None}
    keys: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": number for name, number in known.items()}
    keys["tokenizer.ggml.add_bos_token"] = before > 0 and chats_begin_so(tokenizer)
    keys["tokenizer.ggml.add_eos_token"] = after > 0
    given = tokenizer.chat_template
    template = given.get("default") if isinstance(given, Mapping) else given
    return keys | ({"tokenizer.chat_template": template} if template else {})


def frame_of(tokenizer: Any) -> tuple[int, int]:
    """How many tokens the tokenizer puts before a text, and after it."""
    bare, framed = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    before = next(at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
    return before, len(framed) - before - len(bare)


def rendered(render: Any, messages: Any) -> str | None:
    """A chat up to the assistant's turn; None where the template refuses it, as some do a system's message."""
    try:
        text = unless_refused(render, messages, True)
    except TunerError:
        return None
    return None if text is None else str(text)


def chats_begin_so(tokenizer: Any) -> bool:
    """Whether chats begin with what the tokenizer puts before a text: llama.cpp puts it before both, or neither.

    True without a template, and for one that refuses a user's message.
    """
    if not tokenizer.chat_template:
        return True
    text = rendered(LoadedTemplates(tokenizer).render, [{"role": "user", "content": "a"}])
    return text is None or text.startswith(tokenizer.bos_token or "")


def named_for(name: str, tokenizer: Any) -> str:
    """The model's name, by which alone llama.cpp knows that special tokens take the spaces after them, as Phi 3's."""
    takes_spaces = any(token.special and token.rstrip for token in tokenizer.added_tokens_decoder.values())
    is_phi = _PHI.search(name) is not None
    return f"{name} (phi-3)" if takes_spaces and not is_phi else name if takes_spaces else _PHI.sub("phi_3", name)


def encoded_otherwise(tokenizer: Any, keys: Mapping[str, Any]) -> list[str]:
    """What llama.cpp gives other ids whatever its file says, with its cut; the proof asks for none of it."""
    cut = table("pre_tokenizers").get(keys.get("tokenizer.ggml.pre", ""), {})
    found = [str(cut["otherwise"])] if "otherwise" in cut else []
    if _composes(tokenizer):
        found.append("characters in several parts, such as e and an accent: it composes none")
    if takes := _taking(tokenizer):
        found.append(f"no-break and wide spaces after {takes[-1]} and the like: it takes ASCII's with them")
    if _TRIM.search(str(tokenizer.chat_template)):
        found.append("messages that begin or end with a no-break or wide space: its templates trim ASCII's")
    return found


def is_alike(tokenizer: Any, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Whether llama.cpp can give a text, and messages, the ids that they have here: see :func:`encoded_otherwise`."""
    if _composes(tokenizer) and not unicodedata.is_normalized("NFC", text):
        return False
    takes = "|".join(map(re.escape, _taking(tokenizer)))
    if takes and re.search(rf"(?:{takes})\s*?[^\S\t-\r ]", text):
        return False
    trimmed = messages if _TRIM.search(str(tokenizer.chat_template)) else ()
    contents = [each["content"] for each in trimmed if isinstance(each.get("content"), str)]
    return all(content.strip() == content.strip(string.whitespace) for content in contents)


def _composes(tokenizer: Any) -> bool:
    normalizer = tokenizer.backend_tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str("e\u0301") == "\u00e9"


def _taking(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.rstrip]


def pre_tokenizer(facts: Mapping[str, Any], texts: Sequence[str]) -> str:
    """llama.cpp's name for what cuts these texts as the tokenizer does. Raises RecipeError where nothing does."""
    wanted = _ids(facts, texts)
    whole = bool(facts["model"].get("ignore_merges"))
    for name, cut in sorted(table("pre_tokenizers").items(), key=lambda item: bool(item[1].get("whole")) != whole):
        splits = [_split(pattern) for pattern in cut["splits"]]
        bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        other = {
            **facts, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_of]},
            "model": {**facts["model"], "ignore_merges": bool(cut.get("whole"))},
        }
        if _ids(other, texts) == wanted:
            return str(name)
    raise RecipeError(
        "llama.cpp has nothing known here that cuts text as this tokenizer does: its ids would be others",
        hint="serve the Hugging Face directory instead: docs/how-to/serve.md",
    )


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _ids(facts: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]]:
    encoded = Tokenizer.from_str(json.dumps(facts)).encode_batch(list(texts), add_special_tokens=False)
    return [each.ids for each in encoded]
