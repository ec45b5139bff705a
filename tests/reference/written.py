"""Conversations written for what goes wrong: repeated, trimmed, empty and equal turns, thoughts, tools, rare text."""

from __future__ import annotations

import random
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
_TOOLS = [WEATHER, CLOCK]

PLAIN = {
    "one turn": turns("Hello", "Hi there."),
    "repeated answers": turns("a", "yes", "b", "yes", "c", "yes", "a", "yes"),
    "repeated turns": turns("again", "same", "again", "same", "again", "same"),
    "all turns equal": turns("echo", "echo", "echo", "echo"),
    "answer within the question": turns("Say yes, yes and yes.", "yes", "Say no yes", "yes"),
    "answer equals the role": turns("user", "assistant", "system", "user"),
    "answer is the system text": turns("q", "be brief", system="be brief"),
    "blanks around": turns("  padded  ", "  padded\t ", " x ", " y "),
    "blank lines after": turns("q\n\n", "a\n\n\n", "q\n", "a\n"),
    "blank line before": turns("\n\nq", "\n\na"),
    "break before": turns("q", "\na", "q", "b"),
    "breaks of Windows": turns("a\r\nb\r\n", "c\r\nd\r\n", "\r\n", "x\r\n"),
    "only blanks": turns("   ", "a", "\n", "b"),
    "empty question": turns("", "a", "", "b"),
    "empty answer first": turns("a", "", "b", "c"),
    "empty answer last": turns("a", "b", "c", ""),
    "empty system": turns("a", "b", system=""),
    "system in the middle": chat([said("user", "a"), said("assistant", "b"), said("system", "now short"),
                                  said("user", "c"), said("assistant", "d")]),
    "two systems": chat([said("system", "s1"), said("system", "s2"), said("user", "c"), said("assistant", "d")]),
    "two questions in a row": chat([said("user", "a"), said("user", "b"), said("assistant", "c")]),
    "two answers in a row": chat([said("user", "a"), said("assistant", "b"), said("assistant", "c")]),
    "ends with a question": turns("a", "b", "c"),
    "thoughts at the end": turns("2+2?", "<think>\nIt is four.\n</think>\n\n4"),
    "thoughts early": turns("2+2?", "<think>\nFour.\n</think>\n\n4", "3+3?", "6"),
    "thoughts everywhere": turns("2+2?", "<think>\nFour.\n</think>\n\n4", "3+3?", "<think>\nSix.\n</think>\n\n6"),
    "empty thoughts": turns("2+2?", "<think>\n\n</think>\n\n4", "3+3?", "<think>\n\n</think>\n\n6"),
    "thoughts cut off": turns("q", "<think>\nI wonder", "q", "</think>\n\na"),
    "thoughts without a break": turns("q", "<think>so</think>a", "q", "<think>hm</think>b"),
    "thinking spoken of": turns("What is <think> and </think>?", "A tag.", "<tool_call> too?", "Yes: </tool_call>."),
    "a tool response from the user": turns("a", "b", "<tool_response>\nx\n</tool_response>", "c"),
    "decomposed letters": turns("Cafe\u0301 A\u030a", "e\u0301te\u0301 \u1112\u1161\u11ab", "n\u0303", "u\u0308ber"),
    "marks that stand alone": turns("\u0301a", "\u0308\u0301", "x", "\u093f\u0915"),
    "a mark at the end": turns("e\u0301", "cafe\u0301", "a\u0323\u0307", "o\u031b\u0301"),
    "compatibility letters": turns("\ufb01 \u2460 \uff21", "\u212b \u2126 \u1e9b\u0323", "\uac00", "\u03d3\u0301"),
    "emoji": turns("👩‍👩‍👧‍👦 🏳️‍🌈", "👍🏽 ok 🇳🇴", "🙂", "🙂🙂"),
    "Chinese and Japanese": turns("你好，世界。", "こんにちは、世界！", "漢字とカタカナ", "測試\u3000全形"),
    "right to left": turns("שלום עולם", "مرحبا بالعالم", "\u200fא\u200e", "סוף."),
    "rare separators": turns("a\u2028b\u2029c", "d\u2028e\u0085f", "\u00a0x\u00a0", "\u200by\ufeff"),
    "control characters": turns("a\tb\x0b\x0c", "c\x1b[0m\x7f", "\x01", "\x1f"),
    "code": turns("def f():\n    return {'a': [1, 2]}\n", "```py\nf(\"{x!r}\")\n```", "{{ x }} {% y %}", "{# z #}"),
    "digits and quotes": turns("1234567 '90", "it's 'll 've 3.14", "0", "1"),
    "long turns": turns(_LONG, _LONG[::-1], _LONG[:3000], "x" * 3000),
    "many turns": turns(*(f"turn {i // 4}" for i in range(60))),
    "without the template's words": turns("assistant\nuser\n", "user\nassistant\n", "im_start", "|im_end|"),
}  # fmt: skip

TOOLS = {
    "tools unused": turns("a", "b", "c", "d", tools=_TOOLS),
    "a call": chat([said("user", "Rain in Oslo?"), calls({"city": "Oslo"}), said("tool", '{"rain": true}'),
                    said("assistant", "Yes.")], _TOOLS),
    "several calls": chat([said("system", "s"), said("user", "Rain?"), calls({"city": "Oslo"}, {"city": "Århus"}),
                           said("tool", "1"), said("tool", "2"), said("assistant", "Both.")], _TOOLS),
    "the same call twice": chat([said("user", "Rain?"), calls({"city": "Oslo"}), said("tool", "no"),
                                 calls({"city": "Oslo"}), said("tool", "no"), said("assistant", "No."),
                                 said("user", "Rain?"), calls({"city": "Oslo"}), said("tool", "no"),
                                 said("assistant", "No.")], _TOOLS),
    "ends with a call": chat([said("user", "Rain?"), calls({"city": "東京", "days": [1, 2.5, None, True]})], _TOOLS),
    "ends with a result": chat([said("user", "Rain?"), calls({"city": "Oslo"}), said("tool", "no")], _TOOLS),
    "results before a question": chat([said("user", "a"), calls({}), said("tool", ""), said("tool", "x"),
                                       said("user", "b"), said("assistant", "c")], _TOOLS),
    "a result without a call": chat([said("user", "a"), said("tool", "r"), said("assistant", "b")]),
    "calls without tools": chat([said("user", "a"), calls({"city": "x"}), said("tool", "r"), said("assistant", "b")]),
    "thoughts and a call": chat([said("user", "a"), {**calls({"city": "x"}), "reasoning_content": "I must look."},
                                 said("tool", "r"), said("assistant", "b", reasoning_content="Now I know.")], _TOOLS),
    "thoughts in a field": chat([said("user", "a"), said("assistant", "b", reasoning_content="t1"),
                                 said("user", "c"), said("assistant", "d", reasoning_content="t2")]),
    "thoughts of an earlier question's calls": chat(
        [said("user", "a"), {**calls({"city": "x"}), "reasoning_content": "first"}, said("tool", "r"),
         said("assistant", "b", reasoning_content="second"), said("user", "c"),
         {**calls({"city": "y"}), "reasoning_content": "third"}, said("tool", "r"),
         said("assistant", "d", reasoning_content="fourth")], _TOOLS),
}  # fmt: skip

UNPROMPTED = {
    "begins with an answer": chat([said("assistant", "Welcome."), said("user", "a"), said("assistant", "b")]),
}
"""No model is prompted with no message: such an answer may be refused, or be as in the reference."""

FLAGS = {
    "none of the flags": turns("a", "b", "c", "d"),
    "one answer not": turns("a", said("assistant", "b", train=False), "c", "d"),
    "the last not": turns("a", "b", "c", said("assistant", "d", train=False)),
    "only the first": turns("a", said("assistant", "b", train=True), "c", said("assistant", "d", train=False)),
    "every answer": turns("a", said("assistant", "b", train=True), "c", said("assistant", "d", train=True)),
    "the question too": turns(said("user", "a", train=True), "b", "c", said("assistant", "d", train=False), system="s"),
    "the system too": chat([said("system", "s", train=True), said("user", "a"), said("assistant", "b")]),
    "no answer": turns("a", said("assistant", "b", train=False)),
    "equal answers, one not": turns("a", "x", "a", said("assistant", "x", train=False), "a", "x"),
}

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
