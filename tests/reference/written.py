"""Conversations written for what goes wrong: repeated, trimmed, empty and equal turns, thoughts, tools, rare text."""

import json
import random
from pathlib import Path
from typing import Any

from tests.reference.formats import Chat, Message

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city — \"now\" 'or' <later> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}


def turns(*contents: str | Message, tools: list[Message] | None = None, system: str | None = None) -> Chat:
    """User and assistant in turns; a message given whole stands as it is and keeps its place in the order."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        role = ("user", "assistant")[i % 2]
        messages.append(content if isinstance(content, dict) else {"role": role, "content": content})
    return chat(messages, tools)


def chat(messages: list[Message], tools: list[Message] | None = None) -> Chat:
    """A conversation whose messages may hold `train`."""
    train = [message.get("train") for message in messages]
    return Chat([{k: v for k, v in message.items() if k != "train"} for message in messages], tools, train)


def said(role: str, content: str, **more: Any) -> Message:
    """One message."""
    return {"role": role, "content": content, **more}


def calls(*arguments: dict[str, Any], content: str = "") -> Message:
    """An assistant's message with one call of `weather` for each of `arguments`."""
    made = [{"type": "function", "function": {"name": "weather", "arguments": value}} for value in arguments]
    return said("assistant", content, tool_calls=made)


_LONG = " ".join(f"Sentence {i} of the {'long' * (i % 4)} turn number {i * i % 997}; and so on." for i in range(200))
_WRITTEN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _chats(group: str) -> dict[str, Chat]:
    return {name: chat(row["messages"], row.get("tools")) for name, row in _WRITTEN[group].items()}


PLAIN = _chats("plain") | {
    "long turns": turns(_LONG, _LONG[::-1], _LONG[:3000], "x" * 3000),
    "many turns": turns(*(f"turn {i // 4}" for i in range(60))),
}
TOOLS, FLAGS = _chats("tools"), _chats("flags")
UNPROMPTED = _chats("unprompted")
"""No model is prompted with no message: such an answer may be refused, or be as in the reference."""

_PARTS = (
    "<think>", "</think>", "<think>\n", "\n</think>\n\n", "<tool_response>", "</tool_response>", "<tool_call>",
    "\n", "\n\n", " ", "  ", "\t", "\r\n", "a", "word", " word", "Word.", "user", "assistant", "tool", "1", "2024",
    "'s", "'", "{", "}}", "{{ x }}", "{%", "|", "<|", "|>", "im_end", "None", "é", "e\u0301", "\u0301", "\u212b",
    "\u1112\u1161", "\u200b", "\u2028", "\u00a0", "\u3000", "\x85", "\x1c", "😀", "👩\u200d👩", "你好", "、", "שלום",
    "ß", "İ", "ﬁ", "\U0001d400",
)  # fmt: skip
_SHAPES = ("ua", "uaua", "sua", "suaua", "uauaua", "utta", "uatua", "uu", "uaa")


def randomly(count: int, seed: int = 0) -> dict[str, Chat]:
    """Conversations of a few shapes, with contents put together from parts; the same ones for a seed."""
    chance = random.Random(seed)
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    made = {}
    for number in range(count):
        shape = chance.choice(_SHAPES)
        messages = [said(roles[role], _content(chance)) for role in shape]
        for message in messages:
            if message["role"] == "assistant" and chance.random() < 0.1:
                message["reasoning_content"] = _content(chance)
        made[f"random {number} {shape}"] = chat(messages)
    return made


def _content(chance: random.Random) -> str:
    return "".join(chance.choices(_PARTS, k=min(int(chance.expovariate(0.3)), 12)))
