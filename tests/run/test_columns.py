"""Columns that a model computes once: parts survive a stop, values are in the order of rows, one launch computes."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuner.data.building import columns as store
from tuner.data.building.columns import building, open_columns
from tuner.errors import DataError
from tuner.parallel.mesh import Mesh
from tuner.run import columns
from tuner.run.columns import ColumnsSpec, Work, computed
from tuner.runtime.console import Console

KEY = "0123456789abcdef"


class Rows:
    """Eleven rows, of which row i has i values."""

    def __len__(self) -> int:
        return 11

    def row(self, i: int) -> Any:
        return SimpleNamespace(number=i)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PART_ROWS", 4)
    monkeypatch.setattr(columns, "PART_ROWS", 4)
    monkeypatch.setattr(columns, "RETRY_S", 0.0)


def spec_in(cache: Path) -> ColumnsSpec:
    rows: Any = Rows()
    return ColumnsSpec(cache, "reference", KEY, {"train": rows}, {"prepared_key": "none"})


def work(asked: list[int], is_stopping: Callable[[], bool] = lambda: False) -> Work:
    def values(rows: Any, row: Any) -> dict[str, Any]:
        asked.append(row.number)
        whole = np.full((row.number, 2), row.number, np.uint16)
        return {"ids": whole, "mean": np.array([row.number / 2], np.float32)}

    return Work(values, Mesh(), Console(main=False), is_stopping)


def test_a_stop_keeps_whole_parts_and_rows_stay_in_their_order(tmp_path: Path) -> None:
    asked: list[int] = []
    calls = count(1)
    with pytest.raises(KeyboardInterrupt):
        computed(spec_in(tmp_path), work(asked, lambda: next(calls) == 7))
    assert asked == [0, 1, 2, 3, 4, 5]
    path, was_there = computed(spec_in(tmp_path), work(asked))
    assert asked[6:] == [4, 5, 6, 7, 8, 9, 10]
    assert not was_there
    found = open_columns(path, "reference", verify=True)["train"]
    assert found["ids"].dtype == np.uint16
    assert found["ids"][:, 1].tolist() == [i for i in range(11) for _ in range(i)]
    assert found["mean"].tolist() == [i / 2 for i in range(11)]
    assert computed(spec_in(tmp_path), work([])) == (path, True)


def test_a_damaged_directory_is_computed_again(tmp_path: Path) -> None:
    path, _ = computed(spec_in(tmp_path), work([]))
    content = (path / "train.mean.npy").read_bytes()
    (path / "train.mean.npy").write_bytes(content[:-1] + b"?")
    with pytest.raises(DataError, match=r"train.mean.npy: its SHA-256 differs"):
        open_columns(path, "reference", verify=True)
    assert computed(spec_in(tmp_path), work([])) == (path, False)
    assert (path / "train.mean.npy").read_bytes() == content


def test_while_another_launch_computes_the_same_it_is_waited_for(tmp_path: Path) -> None:
    looks = count(1)
    with building(tmp_path, "reference", KEY), pytest.raises(KeyboardInterrupt):
        computed(spec_in(tmp_path), work([], lambda: next(looks) == 3))
    assert computed(spec_in(tmp_path), work([]))[1] is False
