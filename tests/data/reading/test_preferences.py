"""Preference and labelled rows of every form, and those that are none: reason, place and the line to write."""

import copy
import json
from typing import Any

import pytest

from tests.data.reading.cases import cases
from tuner.config.methods import ExampleKind
from tuner.data.reading.block import RawRecord
from tuner.data.reading.blocks import position_of
from tuner.data.reading.examples import Labelled, Pair
from tuner.data.reading.problems import RecordProblem
from tuner.data.reading.proposals import ProposedReading, proposals, reading_for
from tuner.data.reading.records import read_as


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
