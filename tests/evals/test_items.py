"""Items are read by their keys; what is wrong is named with its line and what to write."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tables import cases
from tuner.errors import DataError
from tuner.evals import task as items_module
from tuner.evals.task import ChoiceItem, QuestionItem, TextItem, id_of, item_of, items_of, read_items

CHOICE = {"prompt": "p", "choices": ["a", "b"], "answer": 1}


def test_each_form_is_known_by_its_keys() -> None:
    assert item_of(CHOICE, "f:1") == ChoiceItem("p", ("a", "b"), 1)
    assert item_of({"text": "t", "source": "s"}, "f:1") == TextItem("t")
    assert item_of({"prompt": "p", "answer": "4", "stop": "\n"}, "f:1") == QuestionItem("p", ("4",), ("\n",))
    assert item_of({"prompt": "p", "answer": ["4", "four"]}, "f:1") == QuestionItem("p", ("4", "four"))


@pytest.mark.parametrize(("record", "said"), cases(__file__, "a_wrong_item_is_named_with_its_place"))
def test_a_wrong_item_is_named_with_its_place(record: Any, said: str) -> None:
    with pytest.raises(DataError, match="^f:3: ") as error:
        item_of(record, "f:3")
    assert said in error.value.message


def test_files_are_read_up_to_so_many_items(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"t{i}"}) + "\n\n" for i in range(4))
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    plain = read_items(tmp_path / "a.jsonl")
    assert (plain.kind, len(plain.items)) == ("text", 4)
    assert read_items(tmp_path / "a.jsonl.gz").ids == plain.ids
    assert read_items(tmp_path / "a.jsonl", 3).ids == plain.ids[:3]
    assert len(set(plain.ids)) == 4 and plain.ids[0] == id_of({"text": "t0"})


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for name, text, said in (
        ("empty", "\n", "holds no items"),
        ("broken", '{"text": "a"}\n{"text"\n', "broken.jsonl:2: not JSON"),
        ("mixed", '{"text": "a"}\n' + json.dumps(CHOICE), "mixed.jsonl:2: is of the kind choice, and those before"),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
        with pytest.raises(DataError, match=said):
            read_items(tmp_path / f"{name}.jsonl")
    with pytest.raises(DataError, match="absent.jsonl: No such file"):
        read_items(tmp_path / "absent.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-20])
    with pytest.raises(DataError, match="damaged or cut off gzip file"):
        read_items(tmp_path / "cut.jsonl.gz")


def test_files_that_would_take_all_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "MOST_ITEMS", 3)
    path = tmp_path / "bomb.jsonl.gz"
    for data, said in (
        (b'{"text": "' + b"a" * (9 << 20), "bomb.jsonl.gz:1: the row is longer than"),
        (b'{"text": "a"}\n' * 4, "holds more than 3 items"),
        (b'{"text": ' + b"[" * 80 + b"\n", "bomb.jsonl.gz:1: not JSON"),
    ):
        path.write_bytes(gzip.compress(data))
        with pytest.raises(DataError, match=said):
            read_items(path)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 4))
    assert len(read_items(path, max_items=3).items) == 3


def test_an_id_follows_from_keys_and_values_alone() -> None:
    assert id_of({"a": 1, "b": [2]}) == id_of({"b": [2], "a": 1}) != id_of({"a": 1, "b": [3]})
    assert items_of([{"text": "x"}], "plug-in").ids[0] == id_of({"text": "x"})
