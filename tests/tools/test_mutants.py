"""The fault table applies to the tree as it is, and the engine's report counts as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants_table import MUTANTS, Mutant


def test_faults_are_many_and_different() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 50


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_fault_applies(mutant: Mutant, root: Path) -> None:
    assert mutant.problem(root) == ""


def test_applying_changes_one_place(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1 + 2\n")
    mutant = Mutant("sign", "a.py", "1 + 2", "1 - 2", ())
    mutant.apply(tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1 - 2\n"
    assert "occurs 0 times" in mutant.problem(tmp_path)
    assert "no file" in Mutant("gone", "b.py", "1", "2", ()).problem(tmp_path)


@pytest.mark.parametrize(("survivors", "code"), [(4, 0), (5, 1)])
def test_nine_in_ten_must_be_caught(survivors: int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [mutants.Verdict(str(i), "survived" if i < survivors else "caught", 1.0) for i in range(40)]
    assert mutants.report(verdicts, 1.0) == code
    assert json.loads(capsys.readouterr().out)["caught"] == 40 - survivors
