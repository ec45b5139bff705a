"""Which `columns` would make a record of other keys readable, guessed from its keys: for errors and `tuner init`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

_PROMPTS = ("prompt", "question", "query", "instruction", "input", "user", "human", "problem", "request", "source")
_COMPLETIONS = (
    *("completion", "answer", "response", "output", "assistant", "reply", "solution", "gpt", "bot", "target"),
    *("best_answer", "answers"),
)
_CONTEXTS = ("input", "context")
_TEXTS = ("text", "content", "body", "document", "article", "passage", "code", "story", "abstract")
"""Names that data sets use, the likeliest first."""
_MOST_KEYS = 64
_SIDES = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("preferred", "non_preferred"),
    ("preferred", "dispreferred"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("chosen_answer", "rejected_answer"),
    ("answer_chosen", "answer_rejected"),
    ("accepted", "rejected"),
    ("better", "worse"),
    ("positive", "negative"),
)
"""Names of a preferred answer and the other."""
COLUMNS_FORM = "columns: {instruction: YOURS, output: YOURS}"
"""What to write where no key of a row is known: the row's own keys stand for YOURS."""
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")


def proposed_columns(record: Mapping[str, Any], chats: bool = False) -> dict[str, str]:
    """Return the `columns`, ours to theirs, under which a record is likely to be readable; empty where none are.

    With `chats` a question and its answer become turns that the model's chat template writes, and not plain text.
    """
    keys = list(record)[:_MOST_KEYS]
    for key in keys:
        form = turns_in(record[key])
        if form is not None:
            return {} if key == form else {form: key}
    texts = {key.lower(): key for key in keys if isinstance(record[key], str)}
    completion = _first(_COMPLETIONS, texts)
    prompt = texts.get("instruction") or _first(_PROMPTS, texts)
    if completion is not None and prompt not in (None, completion):
        if chats or ("instruction" in texts and completion != texts.get("output")):
            context = _first([name for name in _CONTEXTS if texts.get(name) != prompt], texts)
            found = {"instruction": prompt, "output": completion, "input": context}
        else:
            found = {"prompt": prompt, "completion": completion}
    else:
        found = {"text": _first(_TEXTS, texts)}
    return {ours: theirs for ours, theirs in found.items() if theirs is not None and ours != theirs}


def proposed_answers(record: Mapping[str, Any], chats: bool = False) -> dict[str, str]:
    """Return the `columns`, ours to theirs, under which a record is likely to be a pair of answers to one prompt.

    `chats` as for :func:`proposed_columns`; empty where there is no such pair, or no other name.
    """
    names = {key.lower(): key for key in list(record)[:_MOST_KEYS] if record[key] is not None}
    sides = next((both for both in _SIDES if set(both) <= set(names)), None)
    if sides is None:
        return {}
    chosen, rejected = (names[side] for side in sides)
    found = {"chosen": chosen, "rejected": rejected}
    prompt = _first(_PROMPTS, {key: name for key, name in names.items() if key not in sides})
    if prompt is not None:
        texts = isinstance(record[prompt], str) and isinstance(record[chosen], str)
        nested = record[prompt]
        if isinstance(nested, dict) and turns_in(nested.get("messages")) is not None:
            prompt = f"{prompt}.messages"
        found = {"instruction" if chats and texts and prompt != "prompt" else "prompt": prompt} | found
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def columns_line(columns: Mapping[str, str]) -> str:
    """`columns` as a recipe has them: `columns: {prompt: question, completion: answer}`."""
    return f"columns: {{{', '.join(f'{ours}: {yaml_word(theirs)}' for ours, theirs in columns.items())}}}"


def yaml_word(text: str) -> str:
    """A text as it stands in a YAML flow mapping: in quotes where it is no plain word."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _first(names: Sequence[str], keys: Mapping[str, str]) -> str | None:
    return next((keys[name] for name in names if name in keys), None)


def turns_in(value: Any) -> str | None:
    """Return which of our keys a list of turns belongs under, by the keys of its items; None for anything else."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = orjson.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return None
    if all("from" in item and "value" in item for item in value):
        return "conversations"
    return "messages" if all("role" in item and ("content" in item or "tool_calls" in item) for item in value) else None
