"""`teachers.json` and `bank.json` are read as they were written, and damage in them is named."""

from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.rundir.versions import TakenVersion, TakenVersions, read_bank, read_teachers, write_bank, write_teachers

STEPS = ((0, "step-7"), (4, "step-9"), (6, "step-30"))
TEACHERS = TakenVersions(tuple(TakenVersion(step, name, "0" * 64) for step, name in STEPS), 8)


def test_teachers_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_teachers(tmp_path) is None
    write_teachers(tmp_path, TEACHERS)
    assert read_teachers(tmp_path) == TEACHERS
    assert TakenVersions.of(TEACHERS.as_plain()) == TEACHERS


def test_a_bank_has_the_versions_of_each_source(tmp_path: Path) -> None:
    assert read_bank(tmp_path) == {}
    bank = {0: TEACHERS, 11: TEACHERS.having(TakenVersion(4, "step-10", "")).looked_after(9)}
    write_bank(tmp_path, bank)
    assert read_bank(tmp_path) == bank and [version.step for version in bank[11].entries] == [0, 4, 6]


def test_each_step_has_one_version() -> None:
    assert [TEACHERS.at(step).name for step in (0, 3, 4, 5, 6, 99)] == [
        "step-7", "step-7", "step-9", "step-9", "step-30", "step-30",
    ]  # fmt: skip
    assert TEACHERS.until(5) == TakenVersions(TEACHERS.entries[:2], 5)
    assert TEACHERS.until(9) == TEACHERS


@pytest.mark.parametrize(
    "text", ["{", '{"versions": [], "looked": 1}', '{"schema": "tuner.teachers/1", "versions": [{"nick": 1}]}',
             '{"schema": "other", "versions": []}'],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    for name, read in (("teachers.json", read_teachers), ("bank.json", read_bank)):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=rf"{name}"):
            read(tmp_path)
