from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import tiny
from tuner.config.recipe import DataSection, ModelSection, SftMethod, TokenizerSection
from tuner.data.batches import GlobalBatches
from tuner.data.explain import explain
from tuner.data.prepare import find_prepared, prepare, prepared_path
from tuner.data.prepared import PackedRows, open_prepared, open_stream
from tuner.data.request import prepare_request
from tuner.errors import DataError, RecipeError


def rows(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [tiny.chat(f"question {i}", f"answer {i}" + " very" * (i % 7)) for i in range(start, start + n)]


def documents(packed: PackedRows) -> list[tuple[int, ...]]:
    found = []
    for row in packed:
        ends = np.cumsum(row.lengths)[:-1]
        found += [tuple(part.tolist()) for part in np.split(row.input_ids, ends)]
    return found


def test_prepared_rows_hold_every_document_once(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(50))
    request = tiny.request(tmp_path / "cache", path, eval="10%", max_length=128)
    info = prepare(request)
    data = open_prepared(info.path, verify=True)
    assert data.eval is not None
    assert data.key == info.key == info.path.name
    train, held = documents(data.train), documents(data.eval)
    assert (len(train), len(held)) == (45, 5)
    tokenizer = request.tokenizer
    expected = [tokenizer.encode(tokenizer.render(row["messages"])) for row in rows(50)]
    assert sorted(train + held) == sorted(map(tuple, expected))
    assert all(data.train.row(i).input_ids.size <= 128 for i in range(len(data.train)))
    for i, row in enumerate(data.train):
        ends = np.cumsum(row.lengths) - row.lengths
        targets = row.trained.copy()
        targets[ends] = False
        assert data.train.trained_per_row[i] == targets.sum()
        assert data.train.tokens_per_row[i] == len(row.input_ids) == row.lengths.sum()
    batches = GlobalBatches(data.train, seed=1, shuffle=True, global_batch_size=3, micro_batch_size=2)
    steps = [batches.step(i) for i in range(batches.steps_per_epoch)]
    assert sum(step.trained_count for step in steps) == info.report["train"]["packed_trained"]
    assert info.report["train"]["packed_tokens"] == sum(map(len, train))
    assert len(data.samples) == 5
    for sample in data.samples:
        assert sample.prompt_text.endswith("<|im_start|>assistant\n")
        assert tokenizer.encode(sample.prompt_text) == sample.prompt_ids
        assert sample.reference.startswith("answer ")
        assert "<|im_end|>" not in sample.reference


def test_preparing_again_is_a_hit_and_a_new_length_does_not_encode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    cache = tmp_path / "cache"
    assert find_prepared(tiny.request(cache, path)) is None
    first = prepare(tiny.request(cache, path))
    again = prepare(tiny.request(cache, path))
    assert (first.cached, again.cached) == (False, True)
    assert (again.path, again.report) == (first.path, first.report)
    assert find_prepared(tiny.request(cache, path)) == first.path
    monkeypatch.setattr("tuner.data.prepare.encode_files", None)
    other = prepare(tiny.request(cache, path, max_length=256))
    unpacked = prepare(tiny.request(cache, path, packing=False))
    assert len({first.key, other.key, unpacked.key}) == 3
    assert unpacked.report["train"]["packed_rows"] == 20
    assert len(list((cache / "encoded").glob("[!.]*"))) == 1
    linked = (other.path / "train.documents.arrow").stat()
    assert linked.st_ino == (first.path / "train.documents.arrow").stat().st_ino
    # Where the rows lie is not part of the key.
    moved = shutil.copy(path, tmp_path / "moved.jsonl")
    assert prepare(tiny.request(cache, moved)).path == first.path


def test_every_field_that_changes_the_output_changes_the_key(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    other = tiny.write_rows(tmp_path / "o.jsonl", rows(21))
    cache = tmp_path / "cache"
    variants: list[dict[str, Any]] = [
        {}, {"max_length": 65}, {"packing": False}, {"too_long": "truncate"}, {"on_bad_row": "skip"}, {"eval": "10%"},
        {"eval": "2 documents"}, {"eval": str(other)}, {"pretrain": True}, {"train_on": "all"},
        {"train_on": "last_assistant"},
    ]  # fmt: skip
    keys = [prepared_path(tiny.request(cache, path, **variant)) for variant in variants]
    keys.append(prepared_path(tiny.request(cache, other)))
    keys.append(prepared_path(tiny.request(cache, {"path": str(path), "format": "messages"})))
    assert len(set(keys)) == len(keys)
    assert prepared_path(tiny.request(cache, path, shuffle=False)) == keys[0]
    assert not cache.exists()


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    path = tiny.write_rows(
        tmp_path / "r.jsonl", [row for row in rows(30) for _ in range(1 + len(str(row)) % 3)] + rows(30)
    )
    infos = [prepare(tiny.request(tmp_path / cache, path, eval="20 documents")) for cache in ("a", "b")]
    data = open_prepared(infos[0].path)
    assert data.eval is not None
    train, held = documents(data.train), documents(data.eval)
    assert 15 <= len(held) <= 20
    assert not set(train) & set(held)
    assert infos[0].report["train"]["duplicates"] > 0
    files = [{entry.name: entry.read_bytes() for entry in info.path.iterdir()} for info in infos]
    assert files[0] == files[1]
    path = tiny.write_rows(tmp_path / "few.jsonl", rows(3))
    with pytest.raises(DataError, match="leaves none to train on"):
        prepare(tiny.request(tmp_path / "a", path, eval="3 documents"))


def test_the_size_of_record_batches_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(60))
    whole = open_prepared(prepare(tiny.request(tmp_path / "a", path, eval="5 documents")).path)
    monkeypatch.setattr("tuner.data.encoded.BATCH_ROWS", 7)
    pieces = open_prepared(prepare(tiny.request(tmp_path / "b", path, eval="5 documents")).path)
    assert whole.eval is not None
    assert pieces.eval is not None
    assert documents(whole.train) == documents(pieces.train)
    assert documents(whole.eval) == documents(pieces.eval)
    assert whole.samples == pieces.samples
    assert whole.train.trained_per_row.tolist() == pieces.train.trained_per_row.tolist()


def test_an_eval_file_is_read_and_overlap_is_counted(tmp_path: Path) -> None:
    train = tiny.write_rows(tmp_path / "t.jsonl", rows(10))
    held = tiny.write_rows(tmp_path / "e.jsonl", rows(4, start=8))
    info = prepare(tiny.request(tmp_path / "cache", train, eval=str(held)))
    assert info.report["overlap"] == 2
    assert (info.report["train"]["documents"], info.report["eval"]["documents"]) == (10, 4)


def test_pretraining_on_text_splits_long_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world " * 100)
    (tmp_path / "b.md").write_text("def f(x):\n  return x\n")
    request = tiny.request(tmp_path / "cache", [str(tmp_path / "a.txt"), str(tmp_path / "b.md")], pretrain=True)
    info = prepare(request)
    data = open_prepared(info.path)
    assert info.report["train"]["split"] == 1
    ids = [i for path in ("a.txt", "b.md") for i in [*request.tokenizer.encode((tmp_path / path).read_text()), 2]]
    assert sorted(i for row in data.train for i in row.input_ids.tolist()) == sorted(ids)
    assert all(row.trained.all() for row in data.train)
    half = prepare(
        tiny.request(tmp_path / "cache", str(tmp_path / "a.txt"), eval=str(tmp_path / "b.md"), pretrain=True)
    )
    (sample,) = open_prepared(half.path).samples
    assert "def f(x):\n  return x\n".startswith(sample.prompt_text)
    assert sample.reference


def test_rows_without_target_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [*rows(5), tiny.chat("only a question"), *rows(2, 90)])
    long = prepare(tiny.request(tmp_path / "cache", path, max_length=50)).report["train"]
    assert long["dropped"] == {"no trained token": 1}
    with pytest.raises(DataError, match="nothing is left") as caught:
        prepare(tiny.request(tmp_path / "cache", path, max_length=8))
    assert "data.max_length" in str(caught.value.hint)
    tiny.write_rows(path, [tiny.chat("only a question")])
    with pytest.raises(DataError, match="nothing to train on in 1 rows: 1 no trained token"):
        prepare(tiny.request(tmp_path / "cache", path))
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        prepare(tiny.request(tmp_path / "cache", path))
    assert not list((tmp_path / "cache").glob("*/.tmp-*"))


def test_arrow_files_open_with_datasets(tmp_path: Path) -> None:
    import datasets

    info = prepare(tiny.request(tmp_path / "cache", tiny.write_rows(tmp_path / "r.jsonl", rows(5))))
    opened = datasets.Dataset.from_file(str(info.path / "train.documents.arrow"))
    assert opened.num_rows == 5
    assert str(open_stream(info.path / "train.documents.arrow").schema.field("input_ids").type) == "list<item: uint16>"


def test_damage_is_found_and_repaired(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    request = tiny.request(tmp_path / "cache", path)
    info = prepare(request)
    target = info.path / "train.rows.arrow"
    good = target.read_bytes()
    target.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(DataError, match="train.rows.arrow"):
        open_prepared(info.path, verify=True)
    target.write_bytes(good[:-9])
    with pytest.raises(DataError, match="train.rows.arrow"):
        open_prepared(info.path)
    said: list[str] = []
    again = prepare(request, lambda label, text: said.append(text))
    assert not again.cached
    assert "damaged" in said[0]
    assert target.read_bytes() == good
    for broken in ({}, {"schema": "tuner.prepared/0"}, {"schema": "tuner.prepared/1"}):
        (info.path / "manifest.json").write_text(json.dumps(broken))
        with pytest.raises(DataError):
            open_prepared(info.path)
    with pytest.raises(DataError, match="not a prepared data directory"):
        open_prepared(tmp_path)


@pytest.mark.parametrize("step", ["encode_files", "split_file", "cut", "write_json", "publish_dir", "_link"])
def test_a_builder_that_dies_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    request = tiny.request(tmp_path / "cache", path, eval="10%")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"tuner.data.prepare.{step}", die)
        # A killed process does not tidy up: only what a new one does counts.
        patch.setattr("tuner.data.prepare.discard_dir", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(request)
    assert find_prepared(request) is None
    info = prepare(request)
    assert not info.cached
    other = prepare(tiny.request(tmp_path / "clean", path, eval="10%"))
    assert {f.name: f.read_bytes() for f in info.path.iterdir()} == {
        f.name: f.read_bytes() for f in other.path.iterdir()
    }


def _build(arguments: tuple[Path, Path]) -> tuple[str, bool]:
    info = prepare(tiny.request(arguments[0], arguments[1]))
    open_prepared(info.path, verify=True)
    return str(info.path), info.cached


def test_two_builders_make_one_directory(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(200))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_build, [(tmp_path / "cache", path)] * 2, chunksize=1)
    assert len({path for path, _ in results}) == 1
    assert sorted(cached for _, cached in results) == [False, True]
    assert not list((tmp_path / "cache").glob("*/.tmp-*"))


def test_explain_names_text_id_and_rule(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(3))
    first, _ = explain(tiny.request(tmp_path / "cache", path), 2)
    assert "".join(token.text for token in first if token.trained) == "answer 0<|im_end|>"
    assert {token.rule for token in first if token.trained} == {"assistant turn"}
    assert {token.rule for token in first if not token.trained} == {"template"}
    assert [token.id for token in first] == tiny.tokenizer().encode(tiny.tokenizer().render(rows(1)[0]["messages"]))


def test_request_resolves_the_length_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.write_directory(tmp_path / "model")
    (directory / "config.json").write_text('{"max_position_embeddings": 512}')
    model = ModelSection(name_or_path=str(directory))

    def length(model: ModelSection, **data: Any) -> int:
        section = DataSection.model_validate({"train": "x", **data})
        request = prepare_request(model, TokenizerSection(), section, SftMethod(), 1)
        assert request.cache_dir == tmp_path / "here"
        return request.max_length

    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "here"))
    assert length(model) == 512
    assert length(model, max_length=100) == 100
    assert length(ModelSection(name_or_path=str(directory), config={"max_position_embeddings": 4096})) == 2048
    with pytest.raises(RecipeError, match="more than the model's 512 positions"):
        length(model, max_length=513)
    (directory / "config.json").unlink()
    assert length(model) == 2048
