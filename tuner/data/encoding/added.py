"""New tokens in a tokenizer's files: appended to its vocabulary, and loaded by transformers like those it had."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from tuner.errors import DataError, RecipeError

if TYPE_CHECKING:
    from tuner.config.recipe import AddedToken

_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FACTS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def with_tokens(files: Mapping[str, bytes], tokens: "Sequence[AddedToken]") -> tuple[dict[str, bytes], range]:
    """A tokenizer directory's files with these tokens, and their ids, which follow on the largest there was.

    They are found in a text as it is, before anything else is made of it. Raises RecipeError for a token that the
    tokenizer has.
    """
    try:
        before = Tokenizer.from_str(files["tokenizer.json"].decode())
        spec, config = _object(files, "tokenizer.json"), _object(files, "tokenizer_config.json")
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"tokenizer.json: {error}") from error
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


def require_ids(files: Mapping[str, bytes], tokens: "Sequence[AddedToken]", ids: range) -> None:
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


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = json.loads(files.get(name, b"{}"))
    if not isinstance(value, dict):
        raise ValueError(f"{name}: not an object")
    return value


def _bytes(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
