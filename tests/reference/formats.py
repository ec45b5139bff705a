"""Training files of several kinds to chat messages, read by the documented rules and by nothing of the product."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
_SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Chat:
    """A conversation as transformers takes it; `train` holds the user's own flag of each message, or None."""

    messages: list[Message]
    tools: list[Message] | None
    train: list[bool | None]

    def row(self) -> dict[str, Any]:
        """The conversation as a row of a messages file."""
        flags = [{} if flag is None else {"train": flag} for flag in self.train]
        messages = [{**message, **flag} for message, flag in zip(self.messages, flags, strict=True)]
        return {"messages": messages, **({"tools": self.tools} if self.tools else {})}


def read(path: Path) -> list[Any]:
    """Every row of a JSON array or a JSONL file, in order."""
    with path.open(encoding="utf-8") as stream:
        return json.load(stream) if path.suffix == ".json" else [json.loads(line) for line in stream]


def chat_of(row: dict[str, Any]) -> Chat:
    """The conversation of a row, whatever its form."""
    if "conversations" in row:
        messages = [_sharegpt(turn["from"], turn["value"]) for turn in row["conversations"]]
    elif "messages" in row:
        messages = [_message(message) for message in row["messages"]]
    else:
        question = row["instruction"] + (f"\n{row['input']}" if row["input"] else "")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    train = [message.pop("train", None) for message in messages]
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    return Chat(messages, tools or None, train)


def for_template(chat: Chat, template: str) -> Chat:
    """The conversation as a template can show it: one that knows no tool calls gets them as the answer's text."""
    if "tool_calls" in template:
        return chat
    return Chat([_call_as_text(message) for message in chat.messages], chat.tools, chat.train)


def _call_as_text(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"]}, ensure_ascii=False)
        for c in calls
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([message["content"]] * bool(message["content"]) + written)}


def _sharegpt(speaker: str, value: str) -> Message:
    if speaker == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(value)]}
    return {"role": _SHAREGPT.get(speaker, speaker), "content": value}


def _message(message: Message) -> Message:
    made: Message = {"role": message["role"], "content": message["content"]}
    if isinstance(message["content"], list):
        parts = [(part["type"], part.get("value", part.get("text"))) for part in message["content"]]
        made["content"] = "".join(value for kind, value in parts if kind == "text")
        thoughts = [value for kind, value in parts if kind == "reasoning"]
        calls = [_call(value) for kind, value in parts if kind == "tool_call"]
        made |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
        made |= {"tool_calls": calls} if calls else {}
    if "loss_weight" in message:
        made["train"] = message["loss_weight"] != 0
    return made


def _call(value: str) -> Message:
    call = json.loads(value)
    return {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
