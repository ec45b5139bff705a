"""What may change between hashing and reading, and what decides the masks besides the tokenizer."""

import json
from pathlib import Path

import pytest

from tests.data import tiny
from tuner.config.recipe import DataSource
from tuner.data.building import documents
from tuner.data.building.prepare import find_prepared, prepare
from tuner.data.building.spec import keys_of
from tuner.data.encoding.tokenizer import TextTokenizer
from tuner.data.reading import json_blocks
from tuner.data.reading.blocks import blocks
from tuner.data.sources import expand
from tuner.errors import DataError


def test_a_source_that_changes_while_it_is_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", "b")])
    request = tiny.request(tmp_path / "cache", path)
    read = documents._read

    def edited(*arguments: object) -> None:
        tiny.write_rows(path, [tiny.chat("a", "other")])
        read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(documents, "_read", edited)
    with pytest.raises(DataError, match=r"r\.jsonl: changed while it was read"):
        prepare(request)
    monkeypatch.undo()
    assert find_prepared(request) is None
    assert not list((tmp_path / "cache" / "encoded").glob("[!.]*"))
    prepare(request)


def test_end_tokens_of_the_model_decide_the_documents(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", "b")])
    tokenizers = [TextTokenizer(tiny.files(), None, ends) for ends in ((), (0,))]
    keys = [keys_of(tiny.request(tmp_path, path, tokenizer=tokenizer)).encoded for tokenizer in tokenizers]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_lines_are_counted_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 200)
    path = tiny.write_rows(tmp_path / "r.jsonl", [tiny.chat("a", f"b {i}") for i in range(40)])
    path.write_text(path.read_text() + "\n{}\n" + path.read_text())
    assert sum(1 for file in expand([DataSource(path=str(path))]) for _ in blocks(file)) > 5
    request = tiny.request(tmp_path / "cache", path, on_bad_row=policy)
    if policy == "error":
        with pytest.raises(DataError, match=r"r\.jsonl:42:1: "):
            prepare(request)
        return
    rejected = [json.loads(line) for line in (prepare(request).path / "rejects.jsonl").read_text().splitlines()]
    assert [line["line"] for line in rejected] == [42]
