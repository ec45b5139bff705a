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
COLUMNS_FORM = "columns: {instruction: YOURS, output: YOURS}"
"""What to write where no key of a row is known: the row's own keys stand for YOURS."""
_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")


def proposed_columns(record: Mapping[str, Any], chats: bool = False) -> dict[str, str]:
    """Return the `columns`, ours to theirs, under which a record is likely to be readable; empty where none are.

    With `chats` a question and its answer become turns that the model's chat template writes, and not plain text.
    """
    keys = list(record)[:_MOST_KEYS]
    for key in keys:
        form = _turns_in(record[key])
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


def columns_line(columns: Mapping[str, str]) -> str:
    """`columns` as a recipe has them: `columns: {prompt: question, completion: answer}`."""
    return f"columns: {{{', '.join(f'{ours}: {yaml_word(theirs)}' for ours, theirs in columns.items())}}}"


def yaml_word(text: str) -> str:
    """A text as it stands in a YAML flow mapping: in quotes where it is no plain word."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _first(names: Sequence[str], keys: Mapping[str, str]) -> str | None:
    return next((keys[name] for name in names if name in keys), None)


def _turns_in(value: Any) -> str | None:
    """Which of our keys a list of turns belongs under, by the keys of its items; None for anything else."""
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
