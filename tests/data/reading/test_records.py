"""Records of every form, answers that are compared too, and those that are none: reason, place, the line to write."""

import copy
import json
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.data.reading.cases import cases
from tests.fixtures import tables
from tuner.config.methods import ExampleKind
from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import position_of
from tuner.data.reading.examples import Conversation, Labelled, Pair
from tuner.data.reading.jsonl import parse_json_record
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import ProposedReading, proposals, reading_for, ways_out
from tuner.data.reading.records import parse_record, read_as, unused_texts


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


def test_a_form_that_is_named_wrongly_has_a_proposal() -> None:
    proposed = proposals({"text": "x"}, [], ProposedReading("sft", "sharegpt"), chats=True)
    assert [one.reading for one in proposed] == [ProposedReading("sft", "text")]


READ = ("kind", "row", "format", "columns")


@pytest.mark.parametrize((*READ, "wanted"), cases("read_as", *READ, "example"))
def test_rows_are_read_as_their_source_says(kind: Any, row: Any, format: str, columns: Any, wanted: Any) -> None:  # noqa: A002
    before = json.dumps(row)
    found = read_as(row, kind, format, columns)
    assert (found, type(found), json.dumps(row)) == (wanted, type(wanted), before)


@pytest.mark.parametrize((*READ, "reason", "path"), cases("not_read_as", *READ, "reason", "path"))
def test_rows_that_are_not_what_their_source_says_are_named(
    kind: Any, row: Any, format: str, columns: Any, reason: str, path: list[Any]  # noqa: A002
) -> None:
    with pytest.raises(RecordProblem, match=re.escape(reason)) as caught:
        read_as(row, kind, format, columns)
    assert (caught.value.path, caught.value.hint) == (tuple(path), None)


def test_reasons_are_short_and_of_few_kinds() -> None:
    kinds = set()
    for i in range(0, 300, 10):
        key = f"k'\"{i}" * (1 + i * 100)
        for row in (
            {"messages": [{"role": f"r{i}", "content": "x"}]}, {"conversations": [{"from": key, "value": "x"}]},
            {"input_ids": [1] * (i + 2), "loss_mask": [1]}, {"prompt": key, "chosen": "x", "rejected": "y"}, {key: 1},
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


def parsed(kind: ExampleKind, row: dict[str, Any]) -> Any:
    return read_as(row, kind, "auto", {})


@pytest.mark.parametrize(("row", "wanted"), cases("pairs", "row", "example"))
def test_pairs_of_every_form(row: dict[str, Any], wanted: Pair) -> None:
    before = copy.deepcopy(row)
    assert parsed("preference", row) == wanted
    assert row == before and reading_for([row], chats=True) == ProposedReading("preference")


@pytest.mark.parametrize(("row", "wanted"), cases("labelled", "row", "example"))
def test_labelled_answers_of_every_form(row: dict[str, Any], wanted: Labelled) -> None:
    before = copy.deepcopy(row)
    assert parsed("unpaired", row) == wanted
    assert row == before
    is_said = str(row.get("label", row.get("kto_tag"))).lower() in {"true", "false"}
    assert reading_for([row], chats=True).kind == ("unpaired" if is_said else "sft")


@pytest.mark.parametrize(
    ("kind", "row", "reason", "at"), cases("bad_compared", "kind", "row", "reason", "at", name="reason")
)
def test_rows_that_compare_nothing_are_refused_at_their_place(
    kind: ExampleKind, row: dict[str, Any], reason: str, at: str
) -> None:
    raw = json.dumps(row).encode()
    with pytest.raises(RecordProblem) as caught:
        parsed(kind, row)
    assert reason in caught.value.reason
    _, col = position_of(RawRecord(1, raw, row, None), caught.value)
    assert raw[col - 1 :].decode().startswith(at)


@pytest.mark.parametrize(
    ("kind", "row", "reason", "lines"), cases("other_methods", "kind", "row", "reason", "lines", name="reason")
)
def test_rows_of_another_method_name_it(
    kind: ExampleKind, row: dict[str, Any], reason: str, lines: list[dict[str, Any]]
) -> None:
    with pytest.raises(RecordProblem, match=reason):
        parsed(kind, row)
    assert [proposal.lines for proposal in proposals(row, [row], ProposedReading(kind), chats=True)] == lines
