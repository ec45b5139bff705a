"""Good rows of every form, and every way we know to break the line that one is written in."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

from tools.row_oracle import LONGEST_LINE
from tools.tables import beside

_TABLE: dict[str, list[Any]] = beside(__file__)
WORDS, ODD = _TABLE["words"], _TABLE["odd"]
CALL = {"name": "look_up", "arguments": {"query": "x", "n": 3}}
TOOLS = [{"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}]
Random = random.Random
Mutation = Callable[[Random, bytes], bytes]


def words(r: Random, least: int = 1) -> str:
    """Some text, of more than blanks: whether a trained blank turn can be told from its frame is not asked here."""
    chosen = r.choices(WORDS, k=r.randint(least, 12))
    return " ".join(["so", *chosen] if chosen else chosen)


def conversation(r: Random) -> list[dict[str, Any]]:
    """Messages of every kind."""
    messages: list[dict[str, Any]] = [{"role": r.choice(["system", "developer"]), "content": words(r)}] * r.randint(
        0, 1
    )
    for _ in range(r.randint(1, 3)):
        messages.append({"role": "user", "content": words(r)})
        answers: list[dict[str, Any]] = [
            {"content": words(r)},
            {"content": words(r)},
            {"content": words(r), r.choice(["train", "loss_weight", "weight"]): r.choice([True, False])},
            {"content": words(r), "loss_weight": r.choice([0.0, 1.0, 1, 0])},
            {"content": [{"type": "text", "text": words(r)}, {"type": "reasoning", "value": words(r)}]},
            {"content": None, "tool_calls": [{"type": "function", "function": CALL}]},
            {"content": "", "tool_calls": [{"name": "look_up", "arguments": json.dumps(CALL["arguments"])}]},
            {"content": [{"type": "tool_call", "value": json.dumps(CALL)}]},
        ]
        messages.append({"role": "assistant", **r.choice(answers)})
        if "tool_calls" in messages[-1]:
            messages.append({"role": r.choice(["tool", "function"]), "name": "look_up", "content": words(r)})
    return messages


def sharegpt(r: Random) -> list[dict[str, Any]]:
    """Turns of every kind."""
    turns = [{"from": "system", "value": words(r)}] * r.randint(0, 1)
    for _ in range(r.randint(1, 3)):
        turns.append({"from": r.choice(["human", "user"]), "value": words(r)})
        if r.random() < 0.3:
            turns.append({"from": "function_call", "value": json.dumps(r.choice([CALL, [CALL, CALL]]))})
            turns.append({"from": r.choice(["observation", "tool", "function_response"]), "value": words(r)})
        turns.append({"from": r.choice(["gpt", "assistant", "chatgpt", "bard", "bing", "model"]), "value": words(r)})
    return turns


def good_row(r: Random) -> dict[str, Any]:
    """A good row of some form."""
    ids = [r.randint(0, 200) for _ in range(r.randint(1, 9))]
    mask = [r.randint(0, 1) for _ in ids]
    labels = [token if flag else -100 for token, flag in zip(ids, mask, strict=True)]
    rows: list[dict[str, Any]] = [
        {"messages": conversation(r)},
        {"messages": conversation(r)},
        {"messages": conversation(r), "tools": r.choice([TOOLS, json.dumps(TOOLS), None, []]), "id": r.randint(0, 9)},
        {"conversations": sharegpt(r), "tools": r.choice(["[]", json.dumps(TOOLS), None])},
        {"instruction": words(r), "input": r.choice(["", words(r)]), "output": words(r)},
        {
            "instruction": words(r), "output": words(r), "history": [[words(r), words(r)]] * r.randint(0, 2),
            "system": "s",
        },
        {"prompt": words(r, 0), "completion": words(r)},
        {"prompt": conversation(r), "completion": [{"role": "assistant", "content": words(r)}]},
        {"text": words(r), "score": r.choice([0.5, 1, None, 2**70])},
        {"input_ids": ids, "labels": labels},
        {"input_ids": ids, "loss_mask": mask, "attention_mask": [1] * len(ids)},
    ]
    return r.choice(rows)


def written(r: Random, row: Any) -> bytes:
    """A row as one of several writers would write it."""
    separators = r.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    return json.dumps(row, ensure_ascii=r.random() < 0.4, separators=separators).encode("utf-8", "replace")


def inside(r: Random, row: Any) -> tuple[Any, Any]:
    """A container somewhere in a row, and one of its keys."""
    places = [(row, key) for key in row]
    for container, key in places:
        item = container[key]
        if isinstance(item, (dict, list)):
            places += [(item, inner) for inner in (item if isinstance(item, dict) else range(len(item)))]
    return r.choice(places)


def with_row(change: Callable[[Random, Any], None]) -> Mutation:
    """A mutation of the value of a line."""

    def mutate(r: Random, line: bytes) -> bytes:
        row = json.loads(line)
        change(r, row)
        return written(r, row)

    return mutate


def wrong_value(r: Random, row: Any) -> None:
    container, key = inside(r, row)
    container[key] = deepcopy(r.choice(ODD))


def lost_key(r: Random, row: Any) -> None:
    container, key = inside(r, row)
    del container[key]


def other_key(r: Random, row: Any) -> None:
    container, key = inside(r, row)
    if isinstance(container, dict):
        container[
            r.choice(["role", "content", "from", "value", "text", "chosen", "rejected", "images", "Messages"])
        ] = container.pop(key) if r.random() < 0.7 else deepcopy(r.choice(ODD))


def other_role(r: Random, row: Any) -> None:
    for turns in row.values():
        for turn in turns if isinstance(turns, list) else []:
            if isinstance(turn, dict) and r.random() < 0.7:
                turn[r.choice(["role", "from"])] = r.choice(
                    ["human", "User", "bot", "", "tool", "system", "function_call"]
                )


def other_wish(r: Random, row: Any) -> None:
    for turns in row.values():
        for turn in turns if isinstance(turns, list) else []:
            if isinstance(turn, dict):
                turn[r.choice(["train", "loss_weight", "weight"])] = r.choice([0, 1, True, False, 0.5, "1", None, -0.0])


def spliced(*pieces: bytes) -> Mutation:
    """One of some bytes put anywhere."""

    def mutate(r: Random, line: bytes) -> bytes:
        at = r.randint(0, len(line))
        return line[:at] + r.choice(pieces) + line[at:]

    return mutate


def in_string(*pieces: bytes) -> Mutation:
    """One of some bytes put where a string begins."""

    def mutate(r: Random, line: bytes) -> bytes:
        starts = [i + 1 for i, byte in enumerate(line) if byte == 0x22]
        at = r.choice(starts) if starts else 0
        return line[:at] + r.choice(pieces) + line[at:]

    return mutate


def with_member(member: Callable[[Random, bytes], bytes]) -> Mutation:
    """One more key and value in the object, or in the first object of it that ends."""

    def mutate(r: Random, line: bytes) -> bytes:
        at = line.find(b"}") if r.random() < 0.5 else line.rfind(b"}")
        return line if at < 0 else line[:at] + b"," + member(r, line) + line[at:]

    return mutate


def flipped(r: Random, line: bytes) -> bytes:
    changed = bytearray(line)
    for _ in range(r.randint(1, 3)):
        changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
    return bytes(changed)


def repeated_key(r: Random, line: bytes) -> bytes:
    key = r.choice(
        [b'"text"', b'"role"', b'"messages"', b'"\\u0072ole"', b'"x"', b'"id"', b'"from"', b'"text" ', b'"a:b"']
    )
    return key + b":" + r.choice([b"1", b'"x"', b'":"', b'"\\u003a"']) + r.choice([b"", b"," + key + b":2"])


def nested(r: Random, line: bytes) -> bytes:
    depth = r.choice([5, 30, 250, 253, 254, 255, 256, 257, 300, 600, 2000, 20_000])
    return b'"n":' + b"[" * depth + b"]" * (depth - (r.random() < 0.1))


def odd_number(r: Random, line: bytes) -> bytes:
    numbers = [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-0",
        "01",
        "1.",
        ".5",
        "0x1",
        "18446744073709551616",
        "-9223372036854775809",
        "1E5",
        "--1",
        "+1",
    ]
    return b'"score":' + r.choice([*numbers, "9" * 5000, "1" * 4000]).encode()


MUTATIONS: dict[str, Mutation] = {
    "nothing": lambda r, line: line,
    "bits flipped": flipped,
    "cut off": lambda r, line: line[: r.randrange(len(line) + 1)],
    "beginning lost": lambda r, line: line[r.randrange(len(line) + 1) :],
    "a member more": with_member(repeated_key),
    "an odd number": with_member(odd_number),
    "deep nesting": with_member(nested),
    "NUL": spliced(b"\0", b"\\u0000"),
    "NUL in text": in_string(b"\0", b"\\u0000", b"\\\\u0000"),
    "surrogates": in_string(
        b"\\ud800",
        b"\\udc00",
        b"\\ud83d\\ude42",
        b"\\ude42\\ud83d",
        b"\\ud83dx\\ude42",
        b"\\ud83d\\ud83d\\ude42",
        b"\\\\ud800",
    ),
    "line separators": in_string(
        "\u2028".encode(), "\u2029".encode(), "\u0085".encode(), b"\x0b", b"\x0c", b"\x1e", b"\x7f"
    ),
    "no UTF-8": spliced(b"\xff", b"\x80", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xc0\x80", b"\xf0\x9f\x99"),
    "escapes": in_string(b"\\x", b"\\u12", b"\\", b"\\n", b"\\/", b"\\u003a", b"\\u0022:", b'\\":', b'":', b'"'),
    "blanks": spliced(b" ", b"\t", b"  ", b"\r", b"\x0b", b"\xc2\xa0"),
    "mark at the beginning": lambda r, line: b"\xef\xbb\xbf" + line,
    "carriage returns": lambda r, line: line + b"\r" * r.randint(1, 2),
    "a blank line": lambda r, line: r.choice([b"", b" ", b"\t \t", b"\r", b"  \r", b"\x0b"]),
    "something else": lambda r, line: r.choice(
        [b"[]", b"3", b"null", b'"x"', b"{}", b"[" + line + b"]", b"{'a': 1}", b"#", b"-"]
    ),
    "two values": lambda r, line: line + r.choice([b"", b" ", b","]) + line,
    "punctuation": spliced(b",", b":", b"{", b"}", b"[", b"]", b'"', b"//", b"/**/"),
    "punctuation lost": lambda r, line: line.replace(r.choice([b",", b":", b'"', b"}", b"]"]), b"", 1),
    "random bytes": lambda r, line: r.randbytes(r.randint(1, 60)).replace(b"\n", b""),
    "a wrong value": with_row(wrong_value),
    "wrong values": with_row(lambda r, row: [wrong_value(r, row) for _ in range(2)] and None),
    "a key lost": with_row(lost_key),
    "another key": with_row(other_key),
    "another role": with_row(other_role),
    "another wish": with_row(other_wish),
}


def lines(count: int, seed: int, long: int) -> Iterator[bytes]:
    """`count` lines without their line feeds, `long` of them longer than any row may be."""
    r = random.Random(seed)
    too_long = set(r.sample(range(count), long))
    for i in range(count):
        if i in too_long:
            yield b'{"text": "' + b"x" * LONGEST_LINE + b'"}'
            continue
        line = written(r, good_row(r))
        yield MUTATIONS[r.choice(list(MUTATIONS))](r, line)
