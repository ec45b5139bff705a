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
    says: tuple[str, ...] = ()
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


def cases() -> Iterator[Case]:
    """All, in the order in which they are tried."""
    yield from LENGTHS
    yield from FORMS
    yield from FLAWS


LENGTHS = (
    Case("chats of 5 to 50 tokens", between(200, 5, 50), Right("sft", 256)),
    Case("chats of 300 tokens", chats((200, 300)), Right("sft", 512)),
    Case("chats of 900 tokens", chats((100, 900)), Right("sft", 1024)),
    Case("chats of 1,600 to 2,000 tokens", between(60, 1600, 1950), Right("sft", 2048)),
    Case("ten in a thousand hold a quarter of the tokens", chats((990, 180), (10, 6000)), Right("sft", 8192)),
    Case("one of 20,000 holds two percent", chats((1000, 950), (1, 20_000)), Right("sft", 20_480)),
    Case(
        "one of 20,000 holds two percent, beyond the positions", chats((1000, 950), (1, 20_000)),
        Right("sft", 1024, longer=1, in_bounds=False), "medium",
    ),
    Case("one of 20,000 holds half a percent", chats((4000, 950), (1, 20_000)), Right("sft", 1024, longer=1)),
    Case("all of 20,000", chats((8, 20_000)), Right("sft", 20_480)),
    Case(
        "all of 20,000, beyond the positions", chats((8, 20_000)),
        Right("sft", 2048, longer=8, truncates=True, in_bounds=False), "short",
    ),
    Case(
        "a third beyond the positions", chats((60, 1100), (30, 4000)),
        Right("sft", 2048, longer=30, in_bounds=False), "short",
    ),
    Case("sorted by length", chats((6000, 180), (500, 3000), shuffled=False), Right("sft", 4096)),
    Case("24 MB, longer at the end", _large_and_longer_at_its_end, Right("sft", 4096), is_large=True),
    Case("200 turns", only(of(12, _many_turns)), Right("sft", 12_288)),
    Case("four bytes a character", only(of(60, _emoji)), Right("sft", 2048)),
    Case("a single row", chats((1, 100)), Right("sft", 256)),
    Case("plain text of 5 to 20 tokens", only(lambda rng: [{"text": said(rng, rng.randint(5, 20))} for _ in range(30)]),
        Right("pretrain", 256), "base"),
    Case("plain text of 20,000 tokens", only(lambda rng: [{"text": said(rng, 20_000)} for _ in range(60)]),
        Right("pretrain", 2048), "base"),
    Case("plain text, too little for long rows",
        only(lambda rng: [{"text": said(rng, rng.randint(100, 900))} for _ in range(80)]),
        Right("pretrain", 1024), "base"),
    Case("a model that is not here", chats((200, 1200)),
        Right("sft", 512, says=("estimated from characters",)), "away"),
)  # fmt: skip
FORMS = (
    Case("ShareGPT", only(of(80, lambda rng: shared(rng, 300))), Right("sft", 512)),
    Case("ShareGPT with a system message",
        only(of(80, lambda rng: shared(rng, 300, system=said(rng, 100)))), Right("sft", 512)),
    Case("alpaca", only(of(80, _alpaca)), Right("sft", 256)),
    Case("alpaca whose input is null", only(of(80, lambda rng: _alpaca(rng, None))), Right("sft", 256)),
    Case("prompts and completions", only(of(80, lambda rng: {"prompt": said(rng, 50), "completion": said(rng, 50)})),
        Right("sft", 256), "base"),
    Case("questions and answers, CSV", lambda rng: {"rows.csv": table("csv", of(80, _asked)(rng))},
        Right("sft", 256, reads={"columns": {"instruction": "question", "output": "answer"}}), source="rows.csv"),
    Case("questions and answers for a base model", only(of(80, _asked)),
        Right("sft", 256, reads={"columns": {"prompt": "question", "completion": "answer"}}), "base"),
    Case("chats, parquet", lambda rng: {"rows.parquet": table("parquet", of(80, lambda r: chat(r, 300))(rng))},
        Right("sft", 512), source="rows.parquet"),
    Case("parquet with a column of nulls",
        lambda rng: {"rows.parquet": table("parquet", of(80, lambda r: {**_alpaca(r), "score": None})(rng))},
        Right("sft", 256), source="rows.parquet"),
    Case("a JSON array", lambda rng: {"rows.json": json.dumps(of(80, _alpaca)(rng)).encode()}, Right("sft", 256),
        source="rows.json"),
    Case("gzip", lambda rng: {"rows.jsonl.gz": gzip.compress(lines(of(80, lambda r: chat(r, 300))(rng)))},
        Right("sft", 512), source="rows.jsonl.gz"),
    Case("a directory, longer in its second file",
        lambda rng: {
            "rows/a.jsonl": lines([chat(rng, 100) for _ in range(40)]),
            "rows/b.jsonl": lines([chat(rng, 3000) for _ in range(40)]),
        },
        Right("sft", 4096), source="rows"),
    Case("text files", lambda rng: {"notes.txt": "\n".join(said(rng, 60) for _ in range(50)).encode()},
        Right("pretrain", 256), "base", source="notes.txt"),
    Case("pairs of texts", only(of(80, lambda rng: pair(rng, 400))), Right("dpo", 512), "base"),
    Case("pairs of chats", only(of(80, pair_of_chats)), Right("dpo", 512)),
    Case("pairs of which a few are long",
        only(lambda rng: [pair(rng, 300) for _ in range(200)] + [pair(rng, 6000)] * 3),
        Right("dpo", 8192), "base"),
    Case("labelled answers", only(of(80, lambda rng: {
            "prompt": said(rng, 50), "completion": said(rng, 50), "label": rng.random() < 0.5})),
        Right("kto", 256), "base"),
    Case("chats and alpaca in one file",
        only(of(80, lambda rng: chat(rng, 100) if rng.random() < 0.5 else _alpaca(rng))),
        Right("sft", 256, says=("messages", "alpaca"))),
    Case("two rows again and again", only(lambda rng: [chat(rng, 100), chat(rng, 100)] * 40),
        Right("sft", 256, says=("that are the same",))),
    Case("chats for a base model", chats((80, 100)), Right("sft", 256, template="chatml"), "base"),
    Case("tools for a base model", only(of(60, with_tools)), Right("sft", 1024, template="chatml"), "base"),
    Case("tools that the model's template leaves out", only(of(60, with_tools)),
        Right("sft", 1024, template="chatml", says=("tools not written",))),
    Case("tools that the model's template writes", only(of(60, with_tools)), Right("sft", 1024), "tools"),
    Case("thoughts for a base model", only(of(60, thinking)), Right("sft", 512, template="qwen3"), "base"),
    Case("thoughts that the model's template leaves out", only(of(60, thinking)),
        Right("sft", 512, template="qwen3", says=("reasoning not written",))),
    Case("keys that are not used", only(of(60, lambda rng: {**_alpaca(rng), "source": "a book"})),
        Right("sft", 256, says=("not used: source",))),
)  # fmt: skip
FLAWS = (
    Case("a completion that is null", lambda rng: broken(
            [{"prompt": said(rng, 30), "completion": said(rng, 30)} for _ in range(200)],
            {150: b'{"prompt": "a", "completion": null}'}),
        Right("sft", 256, bad=1, says=("rows.jsonl:151:",)), "base"),
    Case("the first, a middle and the last line", lambda rng: broken(
            [chat(rng, 100) for _ in range(300)], {0: b"{", 150: b"[]", 299: b'{"messages": []}'}),
        Right("sft", 256, bad=3, says=("rows.jsonl:1:",))),
    Case("24 MB, one bad row near the end", _large_with_a_bad_row, Right("sft", 512, bad=1), is_large=True),
    Case("a chat without an answer", lambda rng: broken(
            [chat(rng, 100) for _ in range(100)], {70: b'{"messages": [{"role": "user", "content": "a"}]}'}),
        Right("sft", 256, empty=1)),
    Case("a role that the template has not", lambda rng: broken(
            [{"prompt": said(rng, 30), "completion": said(rng, 30)} for _ in range(200)],
            {99: b'{"prompt": ["a"], "completion": "b"}'}),
        Right("sft", 256, bad=1), "base"),
)  # fmt: skip
