from __future__ import annotations

import json
from typing import Any

import pytest
from ruamel.yaml import YAML

from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import position_of
from tuner.data.reading.jsonl import parse_json_record
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import Reading, proposals, ways_out
from tuner.data.reading.records import Conversation, PlainText, PromptCompletion, Tokens, parse_record, unused_texts

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"name": "f", "parameters": {"type": "object"}}


def user(content: Any = "q", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def turn(speaker: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def chat(*messages: dict[str, Any], train: list[bool | None] | None = None, tools: Any = None) -> Conversation:
    return Conversation(list(messages), train or [None] * len(messages), tools)


GOOD: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({"messages": [user(), answer()], "id": 7, "source": {"a": [1]}}, chat(user(), answer())),
    "a system turn": (
        {"messages": [{"role": "developer", "content": "s"}, user(), answer()]},
        chat({"role": "system", "content": "s"}, user(), answer()),
    ),
    "the function role": (
        {"messages": [{"role": "function", "name": "f", "content": "1"}]},
        chat({"role": "tool", "name": "f", "content": "1"}),
    ),
    "text parts": (
        {"messages": [user([{"type": "text", "text": "q"}, {"type": "text", "value": "2"}]), answer()]},
        chat(user("q2"), answer()),
    ),
    "reasoning parts": (
        {
            "messages": [
                answer([{"type": "reasoning", "value": "hm"}, {"type": "text", "text": "a"}]),
                answer([{"type": "thinking", "thinking": "so"}]),
            ]
        },
        chat(answer(reasoning_content="hm"), answer("", reasoning_content="so")),
    ),
    "tool call parts": (
        {
            "messages": [
                answer([{"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]),
                answer([{"type": "tool_call", "name": "f", "arguments": {"x": 1}}]),
            ]
        },
        chat(answer("", tool_calls=[CALL]), answer("", tool_calls=[CALL])),
    ),
    "tool calls": (
        {"messages": [user(), answer(None, tool_calls=[{"id": "1", **CALL}])], "tools": [TOOL]},
        chat(user(), answer("", tool_calls=[{"id": "1", **CALL}]), tools=[TOOL]),
    ),
    "arguments as text": (
        {"messages": [answer("", tool_calls=[{"function": {"name": "f", "arguments": '{"x": 1}'}}])]},
        chat(answer("", tool_calls=[CALL])),
    ),
    "arguments that are no object": (
        {"messages": [answer("", tool_calls=[{"name": "f", "arguments": "x="}, {"name": "f", "arguments": "3"}])]},
        chat(
            answer("", tool_calls=[{**CALL, "function": {"name": "f", "arguments": text}} for text in ("x=", "3")]),
        ),
    ),
    "a call without arguments": (
        {"messages": [answer("", tool_calls=[{"name": "f"}])]},
        chat(answer("", tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}])),
    ),
    "nulls of a table": (
        {"messages": [user(tool_calls=None, name=None, train=None)], "tools": None, "images": [], "text": None},
        chat(user()),
    ),
    "tools as text": ({"messages": [user()], "tools": json.dumps([TOOL])}, chat(user(), tools=[TOOL])),
    "openai tools": (
        {"messages": [user()], "tools": [{"type": "function", "function": TOOL}]},
        chat(user(), tools=[{"type": "function", "function": TOOL}]),
    ),
    "no tools": ({"messages": [user()], "tools": "[]"}, chat(user())),
    "wishes": (
        {"messages": [user(train=True), answer(loss_weight=0.0), answer(weight=1), answer(train=False, weight=0)]},
        chat(user(), answer(), answer(), answer(), train=[True, False, True, False]),
    ),
    "sharegpt": (
        {"conversations": [turn("human", "q"), turn("gpt", "a", weight=0)], "system": "s", "tools": "[]"},
        chat({"role": "system", "content": "s"}, user(), answer(), train=[None, None, False]),
    ),
    "sharegpt speakers": (
        {"conversations": [turn(name, "x") for name in ("system", "user", "chatgpt", "observation", "model", "tool")]},
        chat(*({"role": r, "content": "x"} for r in ("system", "user", "assistant", "tool", "assistant", "tool"))),
    ),
    "sharegpt calls": (
        {
            "conversations": [
                turn("function_call", '{"name": "f", "arguments": {"x": 1}}'),
                turn(
                    "function_call",
                    '[{"name": "f", "arguments": "{\\"x\\": 1}"}, {"name": "f", "arguments": {"x": 1}}]',
                ),
                turn("function_response", "1"),
            ],
            "tools": json.dumps([TOOL]),
        },
        chat(
            answer("", tool_calls=[CALL]),
            answer("", tool_calls=[CALL, CALL]),
            {"role": "tool", "content": "1"},
            tools=[TOOL],
        ),
    ),
    "openai messages named conversations": ({"conversations": [user(), answer()]}, chat(user(), answer())),
    "sharegpt turns named messages": ({"messages": [turn("human", "q"), turn("gpt", "a")]}, chat(user(), answer())),
    "alpaca": ({"instruction": "do", "input": "this", "output": "a"}, chat(user("do\nthis"), answer())),
    "alpaca without input": ({"instruction": "do", "output": "a", "text": "x"}, chat(user("do"), answer())),
    "alpaca, empty input": ({"instruction": "do", "input": "", "output": "a"}, chat(user("do"), answer())),
    "alpaca, input alone": ({"instruction": "", "input": "this", "output": "a"}, chat(user("this"), answer())),
    "alpaca history": (
        {"instruction": "do", "output": "a", "history": [["h", "g"]], "system": "s"},
        chat({"role": "system", "content": "s"}, user("h"), answer("g"), user("do"), answer()),
    ),
    "prompt and completion": ({"prompt": "", "completion": "a", "text": "x"}, PromptCompletion("", "a")),
    "prompt messages": (
        {"prompt": [user(), answer(train=True)], "completion": [answer()], "tools": [TOOL]},
        chat(user(), answer(), answer(), train=[False, True, None], tools=[TOOL]),
    ),
    "text": ({"text": "x", "meta": None}, PlainText("x")),
    "tokens": ({"input_ids": [5, 0, 4294967295]}, Tokens([5, 0, 4294967295], None)),
    "labels": ({"input_ids": [5, 0, 5], "labels": [-100, 0, 5]}, Tokens([5, 0, 5], [False, True, True])),
    "masks": (
        {"input_ids": [5, 6], "attention_mask": [1, 1], "loss_mask": [0, 1], "labels": [-100, 6], "trained": None},
        Tokens([5, 6], [False, True]),
    ),
    "assistant masks": ({"input_ids": [5, 6], "assistant_masks": [True, False]}, Tokens([5, 6], [True, False])),
    "lists as text": ({"input_ids": "[5, 6]", "loss_mask": " [0, 1]"}, Tokens([5, 6], [False, True])),
    "messages as text": ({"messages": json.dumps([user()])}, chat(user())),
}


@pytest.mark.parametrize("name", GOOD)
def test_rows_become_examples(name: str) -> None:
    row, expected = GOOD[name]
    before = json.dumps(row)
    example = parse_record(row)
    assert example == expected
    assert type(example) is type(expected)
    assert json.dumps(row) == before


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "no messages or conversations or prompt", "no keys"),
    ({"txt": "x"}, "did you mean 'text'", ""),
    ({"message": [], "x": 1}, "did you mean 'messages'", ""),
    ({"messages": "x"}, "messages is a list, got a string", '"x"'),
    ({"messages": "[1"}, "messages: not JSON", '"[1"'),
    ({"messages": []}, "messages is empty", "[]"),
    ({"messages": None}, "messages is null", "null"),
    ({"messages": [3]}, "a message is an object, got a number", "3"),
    ({"messages": [{"content": "x"}]}, "unknown role null; known: system, user", '{"content"'),
    ({"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'", '"human"'),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role a list", '["user"]'),
    ({"messages": [{"role": "x" * 99, "content": "x"}]}, "...'; known", '"xxx'),
    ({"messages": [{"role": "user"}]}, "content is a string, got null", '{"role"'),
    ({"messages": [user({"a": 1})]}, "content is a string, got an object", '{"a"'),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "only text parts can be trained, got 'image", "{"),
    ({"messages": [user(["x"])]}, "only text parts", '"x"'),
    ({"messages": [user([{"type": "text", "text": 3}])]}, "text is a string, got a number", "3"),
    ({"messages": [user(train=1)]}, "train is true or false", "1"),
    ({"messages": [user(weight=0.5)]}, "weight is 0 or 1", "0.5"),
    ({"messages": [user(loss_weight="1")]}, "loss_weight is 0 or 1", '"1"'),
    ({"messages": [user(train=True, weight=0)]}, "train and weight contradict each other", "0"),
    ({"messages": [user(tool_calls=[CALL])]}, "tool_calls in a message of user", "["),
    ({"messages": [answer(tool_calls={"a": 1})]}, "tool_calls is a list, got an object", '{"a"'),
    ({"messages": [answer(tool_calls=["x"])]}, "a tool call is an object", '"x"'),
    ({"messages": [answer(tool_calls=[{"function": {}}])]}, "a tool call has a name", '{"function"'),
    ({"messages": [answer(tool_calls=[{"name": "f", "arguments": 3}])]}, "arguments is an object or JSON", '{"name"'),
    ({"messages": [answer([{"type": "tool_call", "value": "{"}])]}, "content: not JSON", "{"),
    ({"messages": [user()], "tools": {"a": 1}}, "tools is a list of objects", '{"a"'),
    ({"messages": [user()], "tools": "f(x)"}, "tools is a list of objects", '"f(x)"'),
    ({"messages": [user()], "tools": "[1]"}, "tools is a list of objects", '"[1]"'),
    ({"messages": [user()], "images": ["a.png"]}, "images, audio and video cannot be trained", '["a.png"]'),
    ({"conversations": [turn("narrator", "x")]}, "unknown speaker 'narrator'", '"narrator"'),
    ({"conversations": [turn("gpt", 3)]}, "value is a string, got a number", "3"),
    ({"conversations": [{"value": "x"}]}, "a turn has from and value", "{"),
    ({"conversations": [turn("function_call", "f(1)")]}, "value: not JSON", '"f(1)"'),
    ({"conversations": [turn("function_call", "3")]}, "a tool call is an object, got a number", '"3"'),
    ({"conversations": [turn("system", "x")], "system": "y"}, "a system prompt both", '"y"'),
    ({"conversations": [turn("gpt", "x")], "system": 3}, "system is a string", "3"),
    ({"instruction": 3, "output": "x"}, "instruction is a string", "3"),
    ({"instruction": "", "input": "", "output": "x"}, "instruction is empty", '""'),
    ({"instruction": "x", "output": ""}, "output is empty", '""'),
    ({"instruction": "x", "output": "y", "history": [["a"]]}, "history is a list of [question, answer]", '["a"]'),
    ({"instruction": "x", "output": "y", "history": [["a", 3]]}, "history is a string, got a number", "3"),
    ({"prompt": "x", "completion": ""}, "completion is empty", '""'),
    ({"prompt": "x", "completion": 3}, "completion is a text or a list of messages, got a number", "3"),
    ({"messages": [user(), answer(" ")]}, "an answer is empty", '{"role": "assistant"'),
    ({"messages": [user([]), answer()]}, "content is empty: it has no part", "[]"),
    ({"messages": [user(), answer([])]}, "content is empty: it has no part", "[]"),
    ({"conversations": [turn("human", "q"), turn("gpt", "")]}, "an answer is empty", '{"from": "gpt"'),
    ({"prompt": [user()], "completion": [answer("")]}, "completion is empty: no word", "[{"),
    ({"prompt": "x", "completion": "\n"}, "completion is empty", '"\\n"'),
    ({"instruction": "x", "output": " "}, "output is empty", '" "'),
    ({"instruction": "x", "output": "y", "history": [["a", ""]]}, "an answer is empty", '""'),
    ({"text": " \n"}, "text is empty", '" \\n"'),
    ({"text": "x", "role": "prompter"}, "one message of a conversation is no document", '"prompter"'),
    ({"messages": [user(), answer()], "train": False}, "train is a flag of messages", "false"),
    ({"messages": [user(), answer()], "train": -1}, "train is a flag of messages", "-1"),
    ({"messages": [user(), answer()], "images": True}, "images, audio and video cannot be trained", "true"),
    ({"messages": [user(images=["a.png"]), answer()]}, "images, audio and video cannot be trained", '["a.png"]'),
    ({"system": "be kind", "prompt": "q", "completion": "a"}, "system has no place next to", '"be kind"'),
    ({"prompt": "q", "completion": None}, "completion is null", "null"),
    ({"prompt": [3], "completion": [answer()]}, "a message is an object", "3"),
    ({"prompt": "x", "chosen": "y", "rejected": "z"}, "a preference row (chosen, rejected)", '"z"'),
    ({"chosen_messages": [], "rejected_messages": []}, "a preference row", "[]"),
    ({"messages": [{"role": "user", "content": "x"}], "label": False}, "a labelled row (label)", "false"),
    ({"text": ""}, "text is empty", '""'),
    ({"text": ["x"]}, "text is a string, got a list", '["x"]'),
    ({"input_ids": []}, "input_ids is empty", "[]"),
    ({"input_ids": [1, -1]}, "input_ids is a list of token ids", "-1"),
    ({"input_ids": [1, True]}, "input_ids is a list of token ids", "true"),
    ({"input_ids": [1, 2**32]}, "input_ids is a list of token ids", "4294967296"),
    ({"input_ids": [[1]]}, "input_ids is a list of token ids", "[1]"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "labels are not shifted", "2, -100"),
    ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries for 2 tokens", "[1]"),
    ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask is a list of 0 and 1", "0.5"),
    ({"input_ids": [1, 2], "loss_mask": [0]}, "loss_mask has 1 entries for 2 tokens", "[0]"),
    ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "padding in input_ids", "[1, 0]}"),
    ({"input_ids": [1], "loss_mask": [0], "labels": [1]}, "loss_mask and labels train different", "[0]"),
]


@pytest.mark.parametrize(("row", "reason", "at"), BAD, ids=[reason for _, reason, _ in BAD])
def test_bad_rows_are_refused_at_their_place(row: dict[str, Any], reason: str, at: str) -> None:
    raw = json.dumps(row).encode()
    with pytest.raises(RecordProblem) as caught:
        parse_record(parse_json_record(raw))
    assert reason in caught.value.reason
    assert "\n" not in caught.value.reason
    line, col = position_of(RawRecord(1, raw, row, None), caught.value)
    assert line == 1
    if at in ("", "no keys"):
        assert col == 1
        assert at in caught.value.reason
    else:
        assert raw.decode()[col - 1 :].startswith(at), raw.decode()[col - 1 :]


HELPED: list[tuple[dict[str, Any], str, dict[str, str], Any]] = [
    (
        {"question": "q", "answer": "a"},
        "auto",
        {"prompt": "question", "completion": "answer"},
        PromptCompletion("q", "a"),
    ),
    (
        {"Query": "q", "response": "a", "id": 3},
        "auto",
        {"prompt": "Query", "completion": "response"},
        PromptCompletion("q", "a"),
    ),
    ({"input": "q", "output": "a"}, "auto", {"prompt": "input", "completion": "output"}, PromptCompletion("q", "a")),
    (
        {"human": "q", "assistant": "a"},
        "auto",
        {"prompt": "human", "completion": "assistant"},
        PromptCompletion("q", "a"),
    ),
    (
        {"instruction": "q", "response": "a"},
        "auto",
        {"prompt": "instruction", "completion": "response"},
        PromptCompletion("q", "a"),
    ),
    (
        {"instruction": "q", "context": "c", "response": "a"},
        "auto",
        {"output": "response", "input": "context"},
        chat(user("q\nc"), answer()),
    ),
    ({"dialog": [user(), answer()]}, "auto", {"messages": "dialog"}, chat(user(), answer())),
    ({"my chat": json.dumps([user(), answer()])}, "auto", {"messages": "my chat"}, chat(user(), answer())),
    ({"turns": [turn("human", "q"), turn("gpt", "a")]}, "auto", {"conversations": "turns"}, chat(user(), answer())),
    ({"content": "t", "url": "u"}, "auto", {"text": "content"}, PlainText("t")),
    ({"prompt": "q", "chosen": "a", "rejected": "b"}, "auto", {"completion": "chosen"}, PromptCompletion("q", "a")),
    (
        {"chosen": [user(), answer()], "rejected": [user(), answer("b")]},
        "auto",
        {"completion": "chosen"},
        chat(user(), answer(), train=[False, None]),
    ),
    (
        {"messages": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]},
        "sharegpt",
        {},
        chat(user(), answer()),
    ),
]
"""Records that are refused, and the format or columns that their problem names as help, with what comes of it."""


@pytest.mark.parametrize(("row", "format", "columns", "expected"), HELPED, ids=[" ".join(row) for row, *_ in HELPED])
def test_a_problem_names_the_line_that_helps(
    row: dict[str, Any],
    format: str,  # noqa: A002
    columns: dict[str, str],
    expected: Any,
) -> None:
    with pytest.raises(RecordProblem) as caught:
        parse_record(row)
    assert caught.value.hint is None
    proposed = proposals(row, [row], Reading("sft"), chats=False)[0]
    assert proposed.reading == Reading("sft", format, columns)
    line = proposed.text("rows.jsonl")
    given = YAML(typ="safe").load(line[line.index("{") : line.rindex("}") + 1])
    assert given == {"path": "rows.jsonl", **({"columns": columns} if columns else {"format": format})}
    assert ("chat_template: chatml" in line) == isinstance(expected, Conversation)
    assert parse_record(row, format, columns) == expected


@pytest.mark.parametrize("row", [{"question": "q"}, {"a": "b", "c": "d"}, {"prompt": 3}, {"messages": []}, {}])
def test_nothing_is_proposed_where_nothing_is_likely(row: dict[str, Any]) -> None:
    assert proposals(row, [row], Reading("sft"), chats=True) == []


ASKED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"question": "q", "answer": "a"}, {"instruction": "question", "output": "answer"}),
    (
        {"question": "q", "response": "a", "context": "c"},
        {"instruction": "question", "output": "response", "input": "context"},
    ),
    ({"prompt": "q", "response": "a"}, {"instruction": "prompt", "output": "response"}),
    ({"input": "q", "answer": "a"}, {"instruction": "input", "output": "answer"}),
]


@pytest.mark.parametrize(("row", "columns"), ASKED, ids=[" ".join(row) for row, _ in ASKED])
def test_for_a_chat_template_questions_and_answers_become_turns(row: dict[str, Any], columns: dict[str, str]) -> None:
    proposed = proposals(row, [row], Reading("sft"), chats=True)[0]
    assert proposed.reading.columns == columns and not proposed.needs_template
    example = parse_record(row, "auto", columns)
    assert isinstance(example, Conversation)
    assert [message["role"] for message in example.messages] == ["user", "assistant"]
    assert unused_texts(row, columns) == ()


def test_where_no_key_is_known_the_form_of_columns_is_shown() -> None:
    form = "write the source as {path: rows.jsonl, columns: {instruction: YOURS, output: YOURS}}"
    row = {"q": "x", "a": "y"}
    assert ways_out(row, [row], Reading("sft"), True, "rows.jsonl") == [f"{form}, with the row's own keys as YOURS"]
    for row, given in (({"q": "x"}, Reading("sft")), ({"q": "x", "a": "y"}, Reading("sft", "messages"))):
        assert ways_out(row, [row], given, True, "rows.jsonl") == []


@pytest.mark.parametrize(
    ("row", "columns", "unused"),
    [
        ({"prompt": "q", "completion": "a", "context": "c", "id": 3, "url": ""}, {}, ("context",)),
        ({"instruction": "q", "output": "a", "context": "c"}, {}, ("context",)),
        ({"instruction": "q", "output": "a", "context": "c"}, {"input": "context"}, ()),
        ({"messages": [user(), answer()], "system": "s"}, {}, ()),
        ({"text": "t", "title": "u"}, {}, ("title",)),
    ],
)
def test_text_that_is_not_read_is_named(row: dict[str, Any], columns: dict[str, str], unused: tuple[str, ...]) -> None:
    assert unused_texts(row, columns) == unused


def test_sharegpt_by_name_reads_other_names_of_roles_alone() -> None:
    row = {"conversations": [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}]}
    with pytest.raises(RecordProblem, match="unknown role 'human'"):
        parse_record(row)
    assert parse_record(row, "sharegpt") == chat(user(), answer())
    with pytest.raises(RecordProblem, match="unknown role 'referee'") as caught:
        parse_record({"messages": [{"role": "referee", "content": "q"}]}, "sharegpt")
    assert (caught.value.path, caught.value.hint) == (("messages", 0, "role"), None)
    with pytest.raises(RecordProblem, match="no conversations; the row has 'text'"):
        parse_record({"text": "x"}, "sharegpt")
    proposed = proposals({"text": "x"}, [], Reading("sft", "sharegpt"), chats=True)
    assert [one.reading for one in proposed] == [Reading("sft", "text")]


def test_a_format_forces_the_form() -> None:
    row = {**GOOD["messages"][0], "text": "whole", "chosen": "x", "rejected": "y"}
    assert parse_record(row, "messages") == GOOD["messages"][1]
    assert parse_record(row, "text") == PlainText("whole")
    with pytest.raises(RecordProblem, match=r"no prompt \+ completion; the row has 'messages'"):
        parse_record(row, "prompt_completion")
    with pytest.raises(RecordProblem, match="a preference row"):
        parse_record(row)


def test_columns_rename_and_reach_into_objects() -> None:
    row = {"q": "x", "chat": {"turns": [user(), answer()], "a.b": "t"}, "text": "whole", "a.b": "dotted"}
    assert parse_record(row, columns={"prompt": "q", "completion": "text"}) == PromptCompletion("x", "whole")
    assert parse_record(row, columns={"messages": "chat.turns"}) == chat(user(), answer())
    assert parse_record(row, columns={"text": "a.b"}) == PlainText("dotted")
    assert parse_record(row, "text", {"prompt": "q"}) == PlainText("whole")
    alpaca = {"instruction": "i", "output": "o"}
    assert parse_record(alpaca, columns={"prompt": "instruction", "completion": "output"}) == PromptCompletion("i", "o")
    assert parse_record({"text": "x"}, columns={"text": "text", "system": "none"}) == PlainText("x")
    assert "prompt" not in row


def test_problems_of_columns_are_named_as_the_row_has_them() -> None:
    with pytest.raises(RecordProblem, match="no 'question', which columns names for prompt; did you mean 'questions'"):
        parse_record({"questions": "x", "a": "y"}, columns={"prompt": "question", "completion": "a"})
    row = {"chat": {"turns": [user(), {"role": "x", "content": "y"}]}}
    with pytest.raises(RecordProblem) as caught:
        parse_record(row, columns={"messages": "chat.turns"})
    assert caught.value.path == ("chat", "turns", 1, "role")


def test_reasons_are_short_and_of_few_kinds() -> None:
    kinds = set()
    for i in range(0, 300, 10):
        key = f"k'\"{i}" * (1 + i * 100)
        for row in (
            {"messages": [{"role": f"r{i}", "content": "x"}]},
            {key: i, "n": 1},
            {"conversations": [turn(key, "x")]},
            {"input_ids": [1] * (i + 2), "loss_mask": [1]},
            {"prompt": key, "chosen": "x", "rejected": "y"},
        ):
            with pytest.raises(RecordProblem) as caught:
                parse_record(row)
            assert len(caught.value.reason) < 400
            kinds.add(caught.value.kind)
    assert len(kinds) <= 10
    with pytest.raises(RecordProblem) as caught:
        parse_json_record(json.dumps({"k" * 9999: 1}).replace("1", '1, "' + "k" * 9999 + '": 2').encode())
    assert caught.value.reason == f"duplicate key '{'k' * 37}...'"
    assert caught.value.kind == "duplicate key '...'"


def test_the_commonest_rows_are_taken_as_they_are() -> None:
    messages = [{"role": "system", "content": "s"}, user(), answer()]
    for row in ({"messages": messages}, {"messages": messages, "id": 3}):
        example = parse_record(row)
        assert isinstance(example, Conversation)
        assert example.messages is messages
        assert example == chat(*messages)
