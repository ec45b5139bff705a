"""What a chat template does not write of a conversation: each kind has a note, and records are counted by note."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuner.data.encoding.template import ChatTemplate
from tuner.data.encoding.template_spy import plain

NOT_SHOWN = "tools not written by the template"
CALLS_AS_TEXT = "tool calls written as text: the template has none"
CALLS_NOT_SHOWN = "tool calls not written by the template"
SHORTENED = "reasoning not written by the template"
CONTENT_NOT_SHOWN = "content not written by the template, or otherwise than it is"
AS_PARTS = "contents given to the template as parts: it reads no strings"
_THOUGHT_TAG = re.compile("</?think>")


def notes_of(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], original: Sequence[Mapping[str, Any]], text: str
) -> list[str]:
    """What a `text` of the template lacks of `messages`; `original` are the record's, before calls became text."""
    notes = []
    if template.reads_parts:
        notes.append(AS_PARTS)
    if any(message.get("tool_calls") for message in original) and "tool_calls" not in template.source:
        notes.append(CALLS_AS_TEXT)
    for message in messages:
        notes += _missing(message, text)
    return notes


def tools_note(template: ChatTemplate, tools: object) -> list[str]:
    """The note where a record has tools and the template never reads them."""
    return [NOT_SHOWN] if tools and "tools" not in template.source.replace("tool_calls", "") else []


def _missing(message: Mapping[str, Any], text: str) -> list[str]:
    notes = []
    content, thought = message.get("content"), message.get("reasoning_content")
    if isinstance(thought, str) and not _stands(thought, text):
        notes.append(SHORTENED)
    if isinstance(content, str) and not _stands(plain(content), text):
        *thoughts, answer = _THOUGHT_TAG.split(plain(content))
        if not _stands(answer, text):
            notes.append(f"{CONTENT_NOT_SHOWN}: {message['role']}")
        elif not all(_stands(part, text) for part in thoughts):
            notes.append(SHORTENED)
    calls = message.get("tool_calls") or ()
    if any(str(call.get("function", call).get("name", "")) not in text for call in calls):
        notes.append(CALLS_NOT_SHOWN)
    return notes


def _stands(words: str, text: str) -> bool:
    """Whether words stand in a text, but for white space around them; as they are, or as a JSON string has them."""
    words = words.strip()
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text
