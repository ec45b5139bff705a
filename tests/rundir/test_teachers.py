"""`teachers.json` is read as it was written, and damage in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.rundir.teachers import TeacherEntry, Teachers, read_teachers, write_teachers

TEACHERS = Teachers(tuple(TeacherEntry(step, f"step-{name}", "0" * 64) for step, name in ((0, 7), (4, 9), (6, 30))), 8)


def test_teachers_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_teachers(tmp_path) is None
    write_teachers(tmp_path, TEACHERS)
    assert read_teachers(tmp_path) == TEACHERS
    assert Teachers.of(TEACHERS.as_plain()) == TEACHERS


def test_each_step_has_one_version() -> None:
    assert [TEACHERS.at(step).name for step in (0, 3, 4, 5, 6, 99)] == [
        "step-7", "step-7", "step-9", "step-9", "step-30", "step-30",
    ]  # fmt: skip
    assert TEACHERS.until(5) == Teachers(TEACHERS.entries[:2], 5)
    assert TEACHERS.until(9) == TEACHERS


@pytest.mark.parametrize(
    "text", ["{", '{"versions": [], "looked": 1}', '{"schema": "tuner.teachers/1", "versions": [{"nick": 1}]}',
             '{"schema": "other", "versions": []}'],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "teachers.json").write_text(text)
    with pytest.raises(DataError, match=r"teachers\.json"):
        read_teachers(tmp_path)
