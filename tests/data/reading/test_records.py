
import json
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.data.reading.cases import cases
from tests.fixtures import tables
from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import position_of
from tuner.data.reading.jsonl import parse_json_record
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import ProposedReading, proposals, ways_out
from tuner.data.reading.records import Conversation, PlainText, PromptCompletion, parse_record, unused_texts


def user(content: Any = "q", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def answer(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def turn(speaker: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


def chat(*messages: dict[str, Any], train: list[bool | None] | None = None, tools: Any = None) -> Conversation:
    return Conversation(list(messages), train or [None] * len(messages), tools)


@pytest.mark.parametrize(("row", "expected"), cases("good", "row", "example"))
def test_rows_become_examples(row: dict[str, Any], expected: Any) -> None:
    before = json.dumps(row)
    example = parse_record(row)
    assert example == expected
    assert type(example) is type(expected)
    assert json.dumps(row) == before


@pytest.mark.parametrize(("row", "reason", "at"), cases("bad", "row", "reason", "at", name="reason"))
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


@pytest.mark.parametrize(
    ("row", "format", "columns", "expected"), cases("helped", "row", "format", "columns", "example", name="row")
)
def test_a_problem_names_the_line_that_helps(
    row: dict[str, Any],
    format: str,  # noqa: A002
    columns: dict[str, str],
    expected: Any,
) -> None:
    with pytest.raises(RecordProblem) as caught:
        parse_record(row)
    assert caught.value.hint is None
    proposed = proposals(row, [row], ProposedReading("sft"), chats=False)[0]
    assert proposed.reading == ProposedReading("sft", format, columns)
    line = proposed.text("rows.jsonl")
    given = YAML(typ="safe").load(line[line.index("{") : line.rindex("}") + 1])
    assert given == {"path": "rows.jsonl", **({"columns": columns} if columns else {"format": format})}
    assert ("chat_template: chatml" in line) == isinstance(expected, Conversation)
    assert parse_record(row, format, columns) == expected


@pytest.mark.parametrize("row", [{"question": "q"}, {"a": "b", "c": "d"}, {"prompt": 3}, {"messages": []}, {}])
def test_nothing_is_proposed_where_nothing_is_likely(row: dict[str, Any]) -> None:
    assert proposals(row, [row], ProposedReading("sft"), chats=True) == []


@pytest.mark.parametrize(("row", "columns"), cases("asked", "row", "columns", name="row"))
def test_for_a_chat_template_questions_and_answers_become_turns(row: dict[str, Any], columns: dict[str, str]) -> None:
    proposed = proposals(row, [row], ProposedReading("sft"), chats=True)[0]
    assert proposed.reading.columns == columns and not proposed.needs_template
    example = parse_record(row, "auto", columns)
    assert isinstance(example, Conversation)
    assert [message["role"] for message in example.messages] == ["user", "assistant"]
    assert unused_texts(row, columns) == ()


def test_where_no_key_is_known_the_form_of_columns_is_shown() -> None:
    form = "write the source as {path: rows.jsonl, columns: {instruction: YOURS, output: YOURS}}"
    row = {"q": "x", "a": "y"}
    sft, chats = ProposedReading("sft"), ProposedReading("sft", "messages")
    assert ways_out(row, [row], sft, True, "rows.jsonl") == [f"{form}, with the row's own keys as YOURS"]
    for row, given in (({"q": "x"}, sft), ({"q": "x", "a": "y"}, chats)):
        assert ways_out(row, [row], given, True, "rows.jsonl") == []


@pytest.mark.parametrize(("row", "columns", "unused"), tables.cases(__file__, "text_that_is_not_read_is_named"))
def test_text_that_is_not_read_is_named(row: dict[str, Any], columns: dict[str, str], unused: list[str]) -> None:
    assert unused_texts(row, columns) == tuple(unused)


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
    proposed = proposals({"text": "x"}, [], ProposedReading("sft", "sharegpt"), chats=True)
    assert [one.reading for one in proposed] == [ProposedReading("sft", "text")]


def test_a_format_forces_the_form() -> None:
    row = {"messages": [user(), answer()], "text": "whole", "chosen": "x", "rejected": "y"}
    assert parse_record(row, "messages") == chat(user(), answer())
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
            {"messages": [{"role": f"r{i}", "content": "x"}]}, {key: i, "n": 1}, {"conversations": [turn(key, "x")]},
            {"input_ids": [1] * (i + 2), "loss_mask": [1]}, {"prompt": key, "chosen": "x", "rejected": "y"},
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
