"""`teachers.json`, `bank.json` and `windows.json` are read as they were written, and damage in them is named."""

import json
from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.rundir.versions import TakenVersion, TakenVersions, read_bank, read_teachers, write_bank, write_teachers
from tuner.rundir.windows import WindowEntry, WindowPosition, entries_of, read_windows, write_windows

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


ENTRIES = (
    WindowEntry("1", ("a.jsonl",), key="0" * 16, rows=8, first_step=0, last_step=2),
    WindowEntry("2", left_out="late"),
    WindowEntry("3", ("c.jsonl", "d.jsonl"), key="1" * 16, rows=9, first_step=2, last_step=5),
)


def test_windows_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_windows(tmp_path) == ()
    write_windows(tmp_path, ENTRIES)
    assert read_windows(tmp_path) == ENTRIES
    assert entries_of([entry.as_state() for entry in ENTRIES]) == ENTRIES


@pytest.mark.parametrize("text", ["{", '{"windows": []}', '{"schema": "other", "windows": []}'])
def test_damaged_windows_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "windows.json").write_text(text)
    with pytest.raises(DataError, match=r"windows\.json"):
        read_windows(tmp_path)


def test_an_entry_with_other_keys_is_damage(tmp_path: Path) -> None:
    (tmp_path / "windows.json").write_text('{"schema": "tuner.windows/1", "windows": [{"files": [], "nick": 1}]}')
    with pytest.raises(DataError, match="nick"):
        read_windows(tmp_path)


def test_the_current_window_may_have_others_after_it() -> None:
    position = WindowPosition(ENTRIES, 0)
    assert (position.current, position.decided) == (ENTRIES[0], ENTRIES[:1])
    assert WindowPosition.of(json.loads(json.dumps(position.as_plain()))) == position
    assert position.with_last_step(7).current.last_step == 7
    assert position.with_last_step(7).entries[1:] == ENTRIES[1:]
