"""Which part of the sources is next: by count, by name, in a directory that grows; each file belongs to one window."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.config.portions import Late, Portion
from tuner.config.recipe import DataSection
from tuner.config.windows import END
from tuner.data.sources import first_portion, next_portion
from tuner.errors import DataError


def section(*paths: Path | str, **windows: object) -> DataSection:
    return DataSection.model_validate({"train": [str(path) for path in paths], "windows": windows})


def all_windows(data: DataSection) -> list[Portion]:
    done: list[Portion] = []
    while isinstance(found := next_portion(data, done), Portion):
        done.append(found)
    return done


def files(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text('{"text": "x"}\n')


def names(window: Portion) -> list[str]:
    return [Path(file).name for file in window.files]


def test_windows_by_count_take_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    files(tmp_path / "logs", "b.jsonl", "a.jsonl", "c.jsonl", "notes.xyz")
    windows = all_windows(section(tmp_path / "logs", files=2))
    assert [names(window) for window in windows] == [["a.jsonl", "b.jsonl"], ["c.jsonl"]]
    assert [window.name for window in windows] == ["a.jsonl to b.jsonl", "c.jsonl"]


def test_each_window_by_count_has_files_of_every_source(tmp_path: Path) -> None:
    files(tmp_path / "chats", "1.jsonl", "2.jsonl", "3.jsonl")
    files(tmp_path / "texts", "a.jsonl", "b.jsonl")
    windows = all_windows(section(tmp_path / "chats", str(tmp_path / "texts" / "*.jsonl"), files=1))
    assert [names(window) for window in windows] == [["1.jsonl", "a.jsonl"], ["2.jsonl", "b.jsonl"], ["3.jsonl"]]


def test_windows_by_name_come_in_the_order_of_the_names(tmp_path: Path) -> None:
    files(tmp_path, "day-1.jsonl", "day-2.jsonl", "day-3.jsonl")
    data = section(tmp_path / "day-{window}.jsonl", names=["3", "1"])
    windows = all_windows(data)
    assert [window.name for window in windows] == ["3", "1"]
    assert [names(window) for window in windows] == [["day-3.jsonl"], ["day-1.jsonl"]]


def test_a_window_by_name_is_late_until_every_source_has_it(tmp_path: Path) -> None:
    files(tmp_path / "a", "1.jsonl")
    data = section(tmp_path / "a" / "{window}.jsonl", tmp_path / "b" / "{window}*.jsonl", names=["1"])
    found = next_portion(data, ())
    assert found == Late("1", f"{tmp_path / 'b' / '1*.jsonl'}: no such file")
    files(tmp_path / "b", "1-x.jsonl", "1-y.jsonl")
    assert names(all_windows(data)[0]) == ["1.jsonl", "1-x.jsonl", "1-y.jsonl"]


def test_a_directory_that_grows_is_waited_for_until_it_is_ended(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    data = section(logs, files=2, grow=True)
    assert isinstance(next_portion(data, ()), Late)  # there is not even a directory
    files(logs, "1.jsonl", ".2.jsonl")
    assert next_portion(data, ()) == Late("number 1", f"{logs}: 1 of the next 2 files")
    files(logs, "2.jsonl", "3.jsonl")
    first = first_portion(data)
    assert names(first) == ["1.jsonl", "2.jsonl"]
    assert isinstance(next_portion(data, [first]), Late)
    (logs / END).touch()
    last = next_portion(data, [first])
    assert isinstance(last, Portion) and names(last) == ["3.jsonl"]
    assert next_portion(data, [first, last]) is None


def test_a_file_that_sorts_before_those_that_are_done_is_taken_next(tmp_path: Path) -> None:
    files(tmp_path / "logs", "2.jsonl")
    data = section(tmp_path / "logs", files=1, grow=True)
    first = first_portion(data)
    files(tmp_path / "logs", "1.jsonl", "3.jsonl")
    rest = next_portion(data, [first])
    assert isinstance(rest, Portion) and names(rest) == ["1.jsonl"]


def test_sources_by_count_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        next_portion(section(tmp_path / "logs", files=1), ())
    with pytest.raises(DataError, match="window 1: .*no such file"):
        first_portion(section(tmp_path / "{window}.jsonl", names=["1"]))


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=3), of_each=st.integers(1, 4))
def test_every_file_belongs_to_exactly_one_window(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], of_each: int
) -> None:
    place = tmp_path_factory.mktemp("sources")
    for number, count in enumerate(counts):
        files(place / str(number), *(f"{i:02}.jsonl" for i in range(count)))
    windows = all_windows(section(*(place / str(number) for number in range(len(counts))), files=of_each))
    taken = [file for window in windows for file in window.files]
    assert sorted(taken) == sorted(map(str, place.rglob("*.jsonl")))
    assert len(taken) == len(set(taken))
