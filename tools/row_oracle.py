"""Whether a line of JSONL is a good row, judged apart from the product: of `tuner` nothing is imported here.

It is written another way: objects are lists of pairs until they are judged, surrogates are looked for in what was
decoded and depth in the brackets of the text. What makes a row good is docs/data-formats.md.
"""

import json
from collections.abc import Callable
from typing import Any, NoReturn

LONGEST_LINE = 64 * 1024 * 1024
DEEPEST = 256
ANSWERING = ["assistant", "gpt", "chatgpt", "bing", "bard", "model"]
SPEAKERS = ["system", "human", "user", *ANSWERING, "function_call", "observation", "tool", "function_response"]
BLANK = "blank"
GOOD = "good"


class Pairs(list[tuple[str, Any]]):
    """An object as it was written."""


class Bad(Exception):
    """Why a line is no good row."""


def judge(line: bytes, first: bool, vocabulary: int = 2**32) -> str:
    """`good`, `blank` or what is wrong with a line without its line feed.

    `first` lines may have a byte order mark; `vocabulary` is the number of ids that rows of ids may name.
    """
    try:
        value = parse(line, first)
    except Bad as bad:
        return str(bad)
    return BLANK if value is None else judge_row(value, vocabulary)


def parse(line: bytes, first: bool) -> dict[str, Any] | None:
    """The object of a line, None for a blank one. Bad where there is none."""
    if len(line) > LONGEST_LINE:
        raise Bad("long")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeError:
        raise Bad("utf-8") from None
    while text.endswith("\r"):
        text = text[:-1]
    if all(character in " \t" for character in text):
        return None
    if depth(text) > DEEPEST:
        raise Bad("depth or syntax")
    decoder = json.JSONDecoder(object_pairs_hook=Pairs, parse_constant=refuse)
    try:
        value, end = decoder.raw_decode(text, len(text) - len(text.lstrip(" \t\n\r")))
    except (ValueError, RecursionError):
        raise Bad("syntax") from None
    if text[end:].strip(" \t\n\r"):
        raise Bad("more than one value")
    plain = unpaired(value)
    if not isinstance(plain, dict):
        raise Bad("no object")
    return plain


def refuse(name: str) -> NoReturn:
    """NaN and its like are no JSON."""
    raise ValueError(name)


def depth(text: str) -> int:
    """The deepest nesting of brackets outside of strings."""
    deepest = now = at = 0
    while at < len(text):
        character = text[at]
        if character == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        elif character in "[{":
            now += 1
            deepest = max(deepest, now)
        elif character in "]}":
            now -= 1
        at += 1
    return deepest


def unpaired(value: Any) -> Any:
    """The value with its objects as dictionaries. Bad for a duplicate key and for text that is none."""
    if isinstance(value, Pairs):
        keys = [unpaired(key) for key, _ in value]
        if len(set(keys)) < len(keys):
            raise Bad("duplicate key")
        return {key: unpaired(item) for key, (_, item) in zip(keys, value, strict=True)}
    if isinstance(value, list):
        return [unpaired(item) for item in value]
    if isinstance(value, str):
        if "\0" in value:
            raise Bad("NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Bad("surrogate") from None
    return value


def judge_row(row: dict[str, Any], vocabulary: int) -> str:
    """`good`, or what is wrong with the schema of a row."""
    there = {key for key, item in row.items() if item is not None}
    if any(row.get(kind) or row.get(f"{kind}s") for kind in ("image", "audio", "video")):
        return "media"
    if type(row.get("train")) in (bool, int, float) and row["train"] != 1:
        return "flag"
    if {"chosen", "rejected"} <= there or {"chosen_messages", "rejected_messages"} <= there:
        return "preference"
    for keys, check in FORMS:
        if keys <= there:
            if not check(row):
                return "schema"
            return "vocabulary" if check is tokens_good and max(from_text(row["input_ids"])) >= vocabulary else GOOD
    return "no form"


def from_text(value: Any) -> Any:
    """A list may be written as JSON text."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    return good_json(value) if depth(value) <= DEEPEST else 0


def good_json(value: Any) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return unpaired(json.loads(value, object_pairs_hook=Pairs, parse_constant=refuse))
    except (ValueError, RecursionError, Bad):
        return None


def tools_good(row: dict[str, Any]) -> bool:
    tools = from_text(row.get("tools"))
    return not row.get("tools") or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))


def turns_good(turns: Any, sharegpt: bool, learned: bool = True) -> bool:
    turns = from_text(turns)
    if not isinstance(turns, list) or not turns or not all(turn_good(turn, sharegpt) for turn in turns):
        return False
    return not learned or not any(map(empty_answer, turns))


def empty_answer(turn: dict[str, Any]) -> bool:
    """Whether a good turn is an answer that may be learned, without a word, a thought or a call."""
    role = turn["role"] if "role" in turn else turn["from"]
    if role not in ANSWERING:
        return False
    if any(turn.get(name) is not None and not turn[name] for name in WISHES):
        return False
    said = turn.get("content") if "role" in turn else turn["value"]
    if turn.get("reasoning_content") or (turn.get("tool_calls") and from_text(turn["tool_calls"])):
        return False
    if isinstance(said, list):
        words = [part for part in said if part["type"] == "text"]
        if len(words) < len(said):
            others = [part for part in said if part["type"] != "text"]
            if any(part["type"] == "tool_call" or words_of(part) for part in others):
                return False
        said = "".join(map(words_of, words))
    return not (said or "").strip()


def words_of(part: dict[str, Any]) -> str:
    return next(part[name] for name in (part["type"], "text", "value") if part.get(name) is not None)


WISHES = ("train", "loss_weight", "weight", "loss")


def turn_good(turn: Any, sharegpt: bool) -> bool:
    if not isinstance(turn, dict):
        return False
    if "role" not in turn and "from" in turn:
        return speaker_good(turn) and wishes_good(turn)
    return not (sharegpt and "role" not in turn) and message_good(turn) and wishes_good(turn)


def speaker_good(turn: dict[str, Any]) -> bool:
    speaker, said = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in SPEAKERS or not isinstance(said, str):
        return False
    if speaker != "function_call":
        return True
    calls = good_json(said)
    return all(map(call_good, calls if isinstance(calls, list) else [calls]))


def message_good(message: dict[str, Any]) -> bool:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if not isinstance(role, str) or role not in ["system", "user", "assistant", "tool", "developer", "function"]:
        return False
    if any(message.get(kind) or message.get(f"{kind}s") for kind in ("image", "audio", "video")):
        return False
    if isinstance(calls, str):
        calls = good_json(calls)
        if calls is None and message["tool_calls"] != "null":
            return False
    if calls is not None and not (isinstance(calls, list) and all(map(call_good, calls))):
        return False
    parts = content if isinstance(content, list) else []
    inside = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_call"]
    if (calls or inside) and role != "assistant":
        return False
    if isinstance(content, list):
        return all(map(part_good, content)) and (bool(content) or bool(calls))
    return isinstance(content, str) or (content is None and bool(calls))


def part_good(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    if kind == "tool_call":
        call = part if part.get("value") is None and part.get("tool_call") is None else None
        call = call or (part["tool_call"] if part.get("value") is None else part["value"])
        return call_good(good_json(call) if isinstance(call, str) else call)
    names = {"text": ("text", "value"), "reasoning": ("reasoning", "text", "value")}
    names["thinking"] = ("thinking", "text", "value")
    if not isinstance(kind, str) or kind not in names:
        return False
    return isinstance(next((part[name] for name in names[kind] if part.get(name) is not None), None), str)


def call_good(call: Any) -> bool:
    if not isinstance(call, dict):
        return False
    function = call["function"] if isinstance(call.get("function"), dict) else call
    arguments = function.get("arguments", function.get("parameters"))
    return isinstance(function.get("name"), str) and (arguments is None or isinstance(arguments, (dict, str)))


def wishes_good(turn: dict[str, Any]) -> bool:
    wishes = {name: turn[name] for name in WISHES if turn.get(name) is not None}
    if "train" in wishes and not isinstance(wishes["train"], bool):
        return False
    return all(isinstance(wish, (int, float)) and wish in (0, 1) for wish in wishes.values()) and (
        len(set(map(bool, wishes.values()))) < 2
    )


def system_good(row: dict[str, Any], first: dict[str, Any]) -> bool:
    if not row.get("system"):
        return True
    speaks = first["role"] if "role" in first else first["from"]
    own = first.get("content") if "role" in first else first["value"]
    if isinstance(own, list):
        own = "".join(map(words_of, own))
    return isinstance(row["system"], str) and (speaks not in ("system", "developer") or own == row["system"])


def chat_good(row: dict[str, Any], turns: Any, sharegpt: bool = False, learned: bool = True) -> bool:
    return turns_good(turns, sharegpt, learned) and tools_good(row) and system_good(row, from_text(turns)[0])


def holds_turns(text: Any) -> bool:
    """Whether a text is JSON for a list of turns, as a CSV file has it."""
    if not isinstance(text, str) or text.lstrip()[:1] != "[":
        return False
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        return False
    spoken = all("from" in item and "value" in item for item in items)
    return spoken or all("role" in item and ("content" in item or "tool_calls" in item) for item in items)


def prompt_good(row: dict[str, Any]) -> bool:
    prompt, completion = row["prompt"], row["completion"]
    asked = [prompt] if isinstance(prompt, dict) else prompt
    answer = [completion] if isinstance(completion, dict) else completion
    if isinstance(answer, str) and not holds_turns(answer):
        if not answer.strip():
            return False
        if isinstance(asked, str) and not holds_turns(asked):
            return not (isinstance(row.get("system"), str) and row["system"].strip())
        return chat_good(row, asked, learned=False)
    if not turns_good(answer, False):
        return False
    answer = from_text(answer)
    if isinstance(asked, str) and not holds_turns(asked):
        asked = [{"role": "user", "content": asked}]
    return chat_good(row, asked, learned=False) and repeats(from_text(asked), answer)


def repeats(asked: list[Any], answer: list[Any]) -> bool:
    """Whether an answer begins with the assistant's words, or with the messages that it answers before these."""
    speakers = [turn["role"] if "role" in turn else turn["from"] for turn in answer]
    spoken = [name in (*ANSWERING, "function_call") for name in speakers]
    if spoken[0]:
        return any(spoken[i] and not empty_answer({**answer[i], **dict.fromkeys(WISHES)}) for i in range(len(answer)))
    return answer[: len(asked)] == asked and len(answer) > len(asked) and spoken[len(asked)]


def alpaca_good(row: dict[str, Any]) -> bool:
    history = from_text(row.get("history")) if row.get("history") else []
    asked = [row["instruction"], "" if row.get("input") is None else row["input"]]
    return (
        all(isinstance(part, str) for part in asked)
        and "".join(asked) != ""
        and isinstance(row["output"], str)
        and row["output"].strip() != ""
        and isinstance(history, list)
        and all(isinstance(pair, list) and [type(said) for said in pair] == [str, str] for pair in history)
        and all(said.strip() for _, said in history)
        and (not row.get("system") or isinstance(row["system"], str))
        and tools_good(row)
    )


def text_good(row: dict[str, Any]) -> bool:
    speaks = isinstance(row.get("role"), str) and row["role"].lower() in [*SPEAKERS, "prompter"]
    return isinstance(row["text"], str) and row["text"].strip() != "" and not speaks


def tokens_good(row: dict[str, Any]) -> bool:
    ids = from_text(row["input_ids"])
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**32 for token in ids):
        return False
    masks = []
    for name in ("attention_mask", "loss_mask", "trained", "assistant_masks", "completion_mask"):
        mask = from_text(row.get(name))
        if row.get(name) is None:
            continue
        if not isinstance(mask, list) or len(mask) != len(ids) or any(type(flag) not in (int, bool) for flag in mask):
            return False
        if any(flag not in (0, 1) for flag in mask) or (name == "attention_mask" and not all(mask)):
            return False
        masks += [[bool(flag) for flag in mask]] if name != "attention_mask" else []
    if row.get("labels") is not None:
        labels = from_text(row["labels"])
        if not isinstance(labels, list) or len(labels) != len(ids) or any(type(label) is not int for label in labels):
            return False
        if any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
            return False
        masks.append([label != -100 for label in labels])
    return all(mask == masks[0] for mask in masks)


FORMS: list[tuple[set[str], Callable[[dict[str, Any]], bool]]] = [
    ({"messages"}, lambda row: chat_good(row, row["messages"])),
    ({"conversations"}, lambda row: chat_good(row, row["conversations"], sharegpt=True)),
    ({"prompt", "completion"}, prompt_good),
    ({"instruction", "output"}, alpaca_good),
    ({"text"}, text_good),
    ({"input_ids"}, tokens_good),
]
