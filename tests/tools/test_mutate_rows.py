"""Broken lines and the oracle's verdicts agree with the product's, and the comparison sees a product that is wrong."""

import json
import re
from pathlib import Path

import pytest

from tools.mutate_rows import compare, main
from tools.row_mutations import MUTATIONS, lines
from tools.row_oracle import judge
from tools.tables import beside
from tuner.data.reading import jsonl

LINES = 600
"""How many are broken and judged."""
FAULTS = ("disagreements", "values_differ", "problems_without_a_place", "exceptions")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutated") / "rows.jsonl"
    path.write_bytes(b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines(LINES, 11, 0)))
    return path


def test_many_lines_are_judged_alike(broken: Path) -> None:
    figures = compare(broken, LINES, command=False)
    assert {name: figures[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0), figures["examples"]
    assert figures["lines"] == LINES
    assert LINES / 2 < figures["bad_by_oracle"] == figures["bad_by_product"] < LINES * 0.9
    assert len(figures["kinds_of_bad"]) >= 10


@pytest.mark.slow
def test_the_command_counts_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mutate_rows.py", "--lines", "600", "--seed", "5", "--long", "0", "--command"])
        assert main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert {name: figures[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert figures["bad_by_product"] > 300


def test_a_wrong_product_is_found(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "strict_json_record", lambda raw: {"text": "anything"})
    assert compare(broken, LINES, command=False)["disagreements"] > LINES / 20
    monkeypatch.undo()
    monkeypatch.setattr(jsonl, "_object", dict)
    assert compare(broken, LINES, command=False)["disagreements"] > 0


def test_every_mutation_breaks_some_line_or_is_meant_to_break_none() -> None:
    import random

    from tools.row_mutations import good_row, written

    r = random.Random(3)
    verdicts: dict[str, set[str]] = {}
    for name, mutate in MUTATIONS.items():
        for _ in range(20):
            line = written(r, good_row(r))
            assert judge(line, False) == "good", line
            verdicts.setdefault(name, set()).add(judge(mutate(r, line).replace(b"\n", b" "), False))
    assert {name for name, seen in verdicts.items() if seen == {"good"}} == {"nothing", "carriage returns"}


@pytest.mark.parametrize(("text", "verdict"), beside(__file__))
def test_the_oracle_itself(text: str, verdict: str) -> None:
    line = re.sub(r"@(\d+)", lambda found: int(found[1]) * "[" + int(found[1]) * "]", text).encode("latin-1")
    assert judge(line, False) == verdict
    if verdict == "syntax":
        assert judge(line, True) == "good"
