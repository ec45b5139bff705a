"""Rows of many forms and lengths, and of each what a recipe has to say: written down from how the rows are made.

Every model here has a tokenizer of bytes, so that a character is a token, and chats have ChatML around them: 20 tokens
for a question and its answer. From the lengths that a case is made with follows the row length that is right: the
shortest of the powers of two from 256 to 8,192, and beyond of the multiples of 4,096, so that longer documents hold 1 %
of the tokens at most, or where the model's positions forbid that, no more than their longest row would lose; of plain
text, which is split and never cut, the longest up to 2,048 that still gives 400 rows, and at least one that keeps the
documents whole.
"""

import csv
import gzip
import io
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.tables import beside

Row = dict[str, Any]
Files = dict[str, bytes]


@dataclass(frozen=True)
class Right:
    """What is right for a case."""

    method: str
    max_length: int
    template: str | None = None
    """`tokenizer.chat_template`; None: the model's own, or none is needed."""
    bad: int = 0
    """Rows that cannot be read, which the recipe has to count."""
    empty: int = 0
    """Rows of which nothing is learned, which the recipe has to count, too."""
    longer: int = 0
    """Documents that are longer than a row and left out, or cut, which the recipe has to count."""
    truncates: bool = False
    """Whether `data.too_long: truncate` is written: where the positions hold less than half of the documents."""
    reads: dict[str, Any] = field(default_factory=dict)
    """`format` and `columns` of the source, where they have to be written."""
    says: Sequence[str] = ()
    """Words that the recipe has to have."""
    in_bounds: bool = True
    """Whether 1 % of the tokens at most are cut: not where the model's positions forbid it."""


@dataclass(frozen=True)
class Case:
    """A source, the model that it is for, and what is right."""

    name: str
    files: Callable[[random.Random], Files]
    right: Right
    model: str = "chat"
    """`chat`, with a ChatML template that has no tools, and `base`, without any: of 32,768 positions; `short` and
    `medium`: as `chat`, of 2,048 and 8,192; `tools`: whose template has tools; `away`: not on this machine."""
    source: str = "rows.jsonl"
    is_large: bool = False
    """Whether its files are of more than 5 MB."""


def said(rng: random.Random, length: int) -> str:
    """A text of exactly so many characters, in words."""
    text = ""
    while len(text) < length:
        text += "".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) + " "
    return text[: length - 1] + "." if length else ""


def chat(rng: random.Random, length: int, **more: Any) -> Row:
    """A question and an answer of so many characters together."""
    asked = min(length // 3, 200)
    turns = [{"role": "user", "content": said(rng, asked)}, {"role": "assistant", "content": said(rng, length - asked)}]
    return {"messages": turns, **more}


def lines(rows: Sequence[Row]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def only(make: Callable[[random.Random], Sequence[Row]]) -> Callable[[random.Random], Files]:
    """One file of JSON lines."""
    return lambda rng: {"rows.jsonl": lines(make(rng))}


def chats(*lengths: tuple[int, int], shuffled: bool = True) -> Callable[[random.Random], Files]:
    """Chats: so many of so many characters."""

    def make(rng: random.Random) -> list[Row]:
        rows = [chat(rng, length) for count, length in lengths for _ in range(count)]
        if shuffled:
            rng.shuffle(rows)
        return rows

    return only(make)


def between(count: int, low: int, high: int) -> Callable[[random.Random], Files]:
    """Chats of lengths drawn evenly."""
    return only(lambda rng: [chat(rng, rng.randint(low, high)) for _ in range(count)])


def broken(rows: Sequence[Row], at: dict[int, bytes]) -> Files:
    """Rows of which some lines are others."""
    written = lines(rows).splitlines(keepends=True)
    for number, line in at.items():
        written[number] = line + b"\n"
    return {"rows.jsonl": b"".join(written)}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Ulm"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}  # fmt: skip


def with_tools(rng: random.Random) -> Row:
    """A chat in which a tool is called; its tools take about 500 characters in a template that writes them."""
    turns: list[Row] = [
        {"role": "user", "content": f"How is the weather in {said(rng, 20)}?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": said(rng, 30)},
        {"role": "assistant", "content": said(rng, 60)},
    ]
    return {"messages": turns, "tools": [TOOL]}


def thinking(rng: random.Random) -> Row:
    """A chat whose answer has a thought in a field of its own."""
    answer = {"role": "assistant", "reasoning_content": said(rng, 150), "content": said(rng, 20)}
    return {"messages": [{"role": "user", "content": said(rng, 60)}, answer]}


def shared(rng: random.Random, length: int, **more: Any) -> Row:
    """A chat in ShareGPT's form."""
    turns = [{"from": "human", "value": said(rng, 40)}, {"from": "gpt", "value": said(rng, length - 40)}]
    return {"conversations": turns, **more}


def pair(rng: random.Random, length: int) -> Row:
    """Two answers to a prompt, of so many characters in all four texts."""
    part = length // 4
    return {"prompt": said(rng, part), "chosen": said(rng, part), "rejected": said(rng, part)}


def pair_of_chats(rng: random.Random) -> Row:
    """Two whole conversations of about 150 characters each."""
    asked = {"role": "user", "content": said(rng, 40)}
    chosen, rejected = ([asked, {"role": "assistant", "content": said(rng, 80)}] for _ in range(2))
    return {"chosen": chosen, "rejected": rejected}


def table(kind: str, rows: Sequence[Row]) -> bytes:
    """A parquet or CSV file."""
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


def of(count: int, make: Callable[[random.Random], Row]) -> Callable[[random.Random], list[Row]]:
    """So many rows."""
    return lambda rng: [make(rng) for _ in range(count)]


def _asked(rng: random.Random) -> Row:
    return {"question": said(rng, 50), "answer": said(rng, 100)}


def _alpaca(rng: random.Random, given: str | None = "") -> Row:
    return {"instruction": said(rng, 60), "input": given, "output": said(rng, 100)}


def _many_turns(rng: random.Random) -> Row:
    """100 questions and answers of 40 characters each: 200 turns of about 50 tokens."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": said(rng, 40)} for i in range(200)]}


def _large_with_a_bad_row(rng: random.Random) -> Files:
    """24 MB of rows of about 500 characters; one near the end is cut off."""
    rows = [chat(rng, 400) for _ in range(300)]
    good = lines(rows)
    many = good * (24_000_000 // len(good))
    return {"rows.jsonl": many + b'{"messages": [{"role": "us\n' + good}


def _large_and_longer_at_its_end(rng: random.Random) -> Files:
    """18 MB of short chats, then 6 MB of chats of 3,000 characters: a quarter of the tokens."""
    short, long = lines([chat(rng, 200) for _ in range(500)]), lines([chat(rng, 3000) for _ in range(100)])
    return {"rows.jsonl": short * (18_000_000 // len(short)) + long * (6_000_000 // len(long))}


def _emoji(rng: random.Random) -> Row:
    """300 characters of four bytes each in an answer: 1,200 tokens."""
    turns = [{"role": "user", "content": said(rng, 30)}, {"role": "assistant", "content": "\U0001f600" * 300}]
    return {"messages": turns}


def _prompted(rng: random.Random, length: int = 50) -> Row:
    return {"prompt": said(rng, length), "completion": said(rng, length)}


def cases() -> Iterator[Case]:
    """All, in the order in which they are tried; what is right for each is in the table of this module."""
    for (name, one), (_, files) in zip(beside(__file__).items(), FILES.items(), strict=True):
        yield Case(name, files, Right(**one.pop("right")), **one)


FILES: dict[str, Callable[[random.Random], Files]] = {
    "chats of 5 to 50 tokens": between(200, 5, 50),
    "chats of 300 tokens": chats((200, 300)),
    "chats of 900 tokens": chats((100, 900)),
    "chats of 1,600 to 2,000 tokens": between(60, 1600, 1950),
    "ten in a thousand hold a quarter of the tokens": chats((990, 180), (10, 6000)),
    "one of 20,000 holds two percent": chats((1000, 950), (1, 20_000)),
    "one of 20,000 holds two percent, beyond the positions": chats((1000, 950), (1, 20_000)),
    "one of 20,000 holds half a percent": chats((4000, 950), (1, 20_000)),
    "all of 20,000": chats((8, 20_000)),
    "all of 20,000, beyond the positions": chats((8, 20_000)),
    "a third beyond the positions": chats((60, 1100), (30, 4000)),
    "sorted by length": chats((6000, 180), (500, 3000), shuffled=False),
    "24 MB, longer at the end": _large_and_longer_at_its_end,
    "200 turns": only(of(12, _many_turns)),
    "four bytes a character": only(of(60, _emoji)),
    "a single row": chats((1, 100)),
    "plain text of 5 to 20 tokens": only(of(30, lambda rng: {"text": said(rng, rng.randint(5, 20))})),
    "plain text of 20,000 tokens": only(of(60, lambda rng: {"text": said(rng, 20_000)})),
    "plain text, too little for long rows": only(of(80, lambda rng: {"text": said(rng, rng.randint(100, 900))})),
    "a model that is not here": chats((200, 1200)),
    "ShareGPT": only(of(80, lambda rng: shared(rng, 300))),
    "ShareGPT with a system message": only(of(80, lambda rng: shared(rng, 300, system=said(rng, 100)))),
    "alpaca": only(of(80, _alpaca)),
    "alpaca whose input is null": only(of(80, lambda rng: _alpaca(rng, None))),
    "prompts and completions": only(of(80, _prompted)),
    "questions and answers, CSV": lambda rng: {"rows.csv": table("csv", of(80, _asked)(rng))},
    "questions and answers for a base model": only(of(80, _asked)),
    "chats, parquet": lambda rng: {"rows.parquet": table("parquet", of(80, lambda r: chat(r, 300))(rng))},
    "parquet with a column of nulls": lambda rng: {
        "rows.parquet": table("parquet", of(80, lambda r: {**_alpaca(r), "score": None})(rng))
    },
    "a JSON array": lambda rng: {"rows.json": json.dumps(of(80, _alpaca)(rng)).encode()},
    "gzip": lambda rng: {"rows.jsonl.gz": gzip.compress(lines(of(80, lambda r: chat(r, 300))(rng)))},
    "a directory, longer in its second file": lambda rng: {
        f"rows/{name}.jsonl": lines([chat(rng, size) for _ in range(40)]) for name, size in (("a", 100), ("b", 3000))
    },
    "text files": lambda rng: {"notes.txt": "\n".join(said(rng, 60) for _ in range(50)).encode()},
    "pairs of texts": only(of(80, lambda rng: pair(rng, 400))),
    "pairs of chats": only(of(80, pair_of_chats)),
    "pairs of which a few are long": only(lambda rng: [pair(rng, 300) for _ in range(200)] + [pair(rng, 6000)] * 3),
    "labelled answers": only(of(80, lambda rng: {**_prompted(rng), "label": rng.random() < 0.5})),
    "chats and alpaca in one file": only(of(80, lambda rng: chat(rng, 100) if rng.random() < 0.5 else _alpaca(rng))),
    "two rows again and again": only(lambda rng: [chat(rng, 100), chat(rng, 100)] * 40),
    "chats for a base model": chats((80, 100)),
    "tools for a base model": only(of(60, with_tools)),
    "tools that the model's template leaves out": only(of(60, with_tools)),
    "tools that the model's template writes": only(of(60, with_tools)),
    "thoughts for a base model": only(of(60, thinking)),
    "thoughts that the model's template leaves out": only(of(60, thinking)),
    "keys that are not used": only(of(60, lambda rng: {**_alpaca(rng), "source": "a book"})),
    "a completion that is null": lambda rng: broken(
        [_prompted(rng, 30) for _ in range(200)], {150: b'{"prompt": "a", "completion": null}'}
    ),
    "the first, a middle and the last line": lambda rng: broken(
        [chat(rng, 100) for _ in range(300)], {0: b"{", 150: b"[]", 299: b'{"messages": []}'}
    ),
    "24 MB, one bad row near the end": _large_with_a_bad_row,
    "a chat without an answer": lambda rng: broken(
        [chat(rng, 100) for _ in range(100)], {70: b'{"messages": [{"role": "user", "content": "a"}]}'}
    ),
    "a role that the template has not": lambda rng: broken(
        [_prompted(rng, 30) for _ in range(200)], {99: b'{"prompt": ["a"], "completion": "b"}'}
    ),
}  # fmt: skip
