"""`windows.json` is read as it was written, and damage in it is named."""

import json
from pathlib import Path

import pytest

from tuner.errors import DataError
from tuner.rundir.windows import WindowEntry, WindowPosition, entries_of, read_windows, write_windows

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
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "windows.json").write_text(text)
    with pytest.raises(DataError, match=r"windows\.json"):
        read_windows(tmp_path)


def test_an_entry_with_other_keys_is_damage(tmp_path: Path) -> None:
    (tmp_path / "windows.json").write_text('{"schema": "tuner.windows/1", "windows": [{"files": [], "nick": 1}]}')
    with pytest.raises(DataError, match="nick"):
        read_windows(tmp_path)


def test_the_window_at_hand_may_have_others_after_it() -> None:
    position = WindowPosition(ENTRIES, 0)
    assert (position.at_hand, position.decided) == (ENTRIES[0], ENTRIES[:1])
    assert WindowPosition.of(json.loads(json.dumps(position.as_plain()))) == position
    assert position.with_last_step(7).at_hand.last_step == 7
    assert position.with_last_step(7).entries[1:] == ENTRIES[1:]
