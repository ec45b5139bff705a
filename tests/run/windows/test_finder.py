"""What the finder makes of windows that are there, late, empty or damaged, and of those that a run knows already."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.config.portions import Portion
from tuner.config.recipe import DataSection
from tuner.data.building.spec import PrepareSpec
from tuner.errors import DataError
from tuner.run.windows.finder import Finder, PreparedWindow
from tuner.rundir.windows import WindowEntry


class Slow:
    """Prepares a window in so many looks: its key is its text, a window without text has no rows, `bad` is damage."""

    def __init__(self, looks: int = 0) -> None:
        self.looks, self.started = looks, 0
        self._window: Portion | None = None
        self._left = 0

    def start(self, window: Portion) -> None:
        assert self._window is None, "one at a time"
        self._window, self._left = window, self.looks
        self.started += 1

    def outcome(self) -> PreparedWindow | None:
        if self._left:
            self._left -= 1
            return None
        window, self._window = self._window, None
        assert window is not None
        text = "".join(Path(file).read_text() for file in window.files)
        if text == "bad":
            raise DataError("rows.jsonl:1:1: not JSON", hint="fix the row")
        return PreparedWindow(text, len(text)) if text else PreparedWindow()

    def end(self) -> None:
        self._window = None


class Place:
    def __init__(self, directory: Path, **windows: Any) -> None:
        self.directory, self.noted = directory, [()]
        train = {"train": [str(directory / "{window}.jsonl")], "windows": {"names": ["1", "2", "3"], **windows}}
        self.spec = PrepareSpec(DataSection.model_validate(train), *[None] * 4, directory)  # type: ignore[arg-type]
        self.preparation = Slow()

    def write(self, **texts: str) -> None:
        for name, text in texts.items():
            (self.directory / f"{name.removeprefix('w')}.jsonl").write_text(text)

    def finder(self, entries: Sequence[WindowEntry] = (), known: Sequence[WindowEntry] = ()) -> Finder:
        def note(every: Sequence[WindowEntry]) -> None:
            self.noted.append(tuple(every))  # type: ignore[arg-type]

        return Finder(self.spec, self.preparation, entries, known, note)


def opened(finder: Finder) -> WindowEntry:
    found = finder.look()
    assert found.kind == "ready", found
    finder.opened(found.entry)
    return found.entry


def test_windows_are_prepared_one_after_the_other(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.preparation.looks = 2
    place.write(w1="aa", w2="b", w3="c")
    finder = place.finder()
    assert [finder.look().kind for _ in range(4)] == ["preparing", "preparing", "ready", "ready"]
    first = opened(finder)
    assert (first.name, first.key, first.rows, first.files) == ("1", "aa", 2, (str(tmp_path / "1.jsonl"),))
    place.preparation.looks = 0
    assert [opened(finder).name, opened(finder).name, finder.look().kind] == ["2", "3", "ended"]
    assert place.preparation.started == 3


def test_a_late_window_stops_the_launch_once_it_is_overdue(tmp_path: Path) -> None:
    finder = Place(tmp_path).finder()
    assert finder.look().kind == "late"
    found = finder.look(overdue=True)
    assert (found.kind, "window 1 is not there" in found.words) == ("stop", True)


def test_a_late_window_is_skipped_for_good_where_the_recipe_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path, late="skip")
    place.write(w2="b")
    finder = place.finder()
    assert finder.look().kind == "late"
    assert finder.look(overdue=True).entry.name == "2"
    assert place.noted[-1] == (WindowEntry("1", left_out="late"),)
    place.write(w1="came after all")
    assert opened(finder).name == "2"


def test_an_empty_window_is_skipped_waited_for_or_refused(tmp_path: Path) -> None:
    def look(empty: str, overdue: bool = False) -> tuple[Place, Finder, str]:
        place = Place(tmp_path, empty=empty)
        place.write(w1="", w2="b")
        finder = place.finder()
        return place, finder, finder.look(overdue).kind

    place, finder, kind = look("skip")
    assert (kind, finder.look().entry.name) == ("ready", "2")
    assert place.noted[-1] == (WindowEntry("1", (str(tmp_path / "1.jsonl"),), "empty"),)
    place, finder, kind = look("wait")
    assert (kind, finder.look().kind, place.preparation.started) == ("late", "late", 1)  # not prepared over and over
    place.write(w1="rows at last")
    assert opened(finder).key == "rows at last"
    assert look("wait", overdue=True)[2] == "stop"
    with pytest.raises(DataError, match=r"window 1: .*1\.jsonl: no rows"):
        look("refuse")


def test_a_damaged_window_is_refused_by_name_until_it_is_repaired(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="bad")
    finder = place.finder()
    for _ in range(3):
        with pytest.raises(DataError, match=r"^window 1: rows\.jsonl:1:1: not JSON$"):
            finder.look()
    assert place.preparation.started == 1
    place.write(w1="good")
    assert opened(finder).key == "good"


def test_windows_of_a_launch_that_had_come_further_are_the_same_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="a", w2="now it is there", w3="c")
    known = [
        WindowEntry("1", (str(tmp_path / "1.jsonl"),), key="a", rows=1, first_step=0, last_step=4),
        WindowEntry("2", left_out="late"),
        WindowEntry("3", (str(tmp_path / "3.jsonl"),), key="c", rows=1, first_step=4, last_step=5),
    ]
    finder = place.finder(known=known)
    assert [opened(finder), opened(finder)] == [known[0], known[2]]
    assert finder.entries == known and finder.look().kind == "ended"


def test_a_known_window_whose_files_changed_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="changed")
    known = [WindowEntry("1", (str(tmp_path / "1.jsonl"),), key="a", rows=1, first_step=0, last_step=4)]
    with pytest.raises(DataError, match="window 1: its files changed since it was opened"):
        place.finder(known=known).look()


def test_all_entries_are_noted_with_those_that_are_known(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.write(w1="", w2="b")
    finder = place.finder()
    entry = replace(finder.look().entry, last_step=2)
    assert [item.name for item in finder.opened(entry)] == ["1", "2"]
