
import gzip
import io
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import tiny
from tests.data.tiny import rows
from tests.fixtures.bits import flip_bit
from tests.fixtures.processes import children
from tests.fixtures.tables import cases
from tuner.config.methods import DpoMethod, SftMethod
from tuner.config.recipe import DataSection, ModelSection, TokenizerSection
from tuner.data.batches import GlobalBatches
from tuner.data.building import apart
from tuner.data.building.documents import explain
from tuner.data.building.prepare import PreparedInfo, find_prepared, prepare
from tuner.data.building.report import pace, report_lines, warnings_of
from tuner.data.building.spec import keys_of, prepare_spec
from tuner.data.encoding.encode import Encoder, FastEncoderMismatch
from tuner.data.prepared import PackedRows, open_prepared, open_stream, record_batches
from tuner.errors import DataError, RecipeError
from tuner.runtime.console import Console


def test_rows_that_may_be_long_are_prepared_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bad = tiny.write_rows(tmp_path / "plain.jsonl", rows(20)), tmp_path / "bad.jsonl.gz"
    bad.write_bytes(gzip.compress(plain.read_bytes() + b"{}\n"))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DataError, match=r"bad\.jsonl\.gz:21:1: ") as caught:
        prepare(tiny.request(tmp_path / "cache", bad))
    assert caught.value.hint
    assert any("in a worker process" in note for note in caught.value.__notes__)
    monkeypatch.delattr(apart, "prepare_apart")  # few plain rows, or a process that has no torch: at once
    prepare(tiny.request(tmp_path / "cache", plain))
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(DataError, match=r"bad\.jsonl\.gz:21:1: "):
        prepare(tiny.request(tmp_path / "cache", bad))


def documents(packed: PackedRows) -> list[tuple[int, ...]]:
    found = []
    for row in packed:
        ends = np.cumsum(row.lengths)[:-1]
        found += [tuple(part.tolist()) for part in np.split(row.input_ids, ends)]
    return found


def files_of(info: PreparedInfo) -> dict[str, bytes]:
    """What prepared data and the one set of documents in its cache hold, by level and name."""
    levels = (info.path, next((info.path.parents[1] / "encoded").glob("[!.]*")))
    return {f"{level.parent.name}/{file.name}": file.read_bytes() for level in levels for file in level.iterdir()}


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


def test_preparing_again_is_a_hit_and_a_new_length_packs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    cache = tmp_path / "cache"
    assert find_prepared(tiny.request(cache, path)) is None
    first = prepare(tiny.request(cache, path))
    again = prepare(tiny.request(cache, path))
    assert (first.cached, again.cached) == (False, True)
    assert (again.path, again.report) == (first.path, first.report)
    assert find_prepared(tiny.request(cache, path)) == first.path
    monkeypatch.setattr("tuner.data.building.rows.build_documents", None)
    other = prepare(tiny.request(cache, path, max_length=256))
    unpacked = prepare(tiny.request(cache, path, packing=False))
    assert len({first.key, other.key, unpacked.key}) == 3
    assert unpacked.report["train"]["packed_rows"] == 20
    assert len(list((cache / "encoded").glob("[!.]*"))) == 1
    linked = (other.path / "train.documents.arrow").stat()
    assert linked.st_ino == (first.path / "train.documents.arrow").stat().st_ino


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
    assert files_of(infos[0]) == files_of(infos[1])
    path = tiny.write_rows(tmp_path / "few.jsonl", rows(3))
    with pytest.raises(DataError, match="leaves none to train on"):
        prepare(tiny.request(tmp_path / "a", path, eval="3 documents"))


def several(directory: Path, files: int, **more: Any) -> list[dict[str, Any]]:
    """Sources of some rows each, one a file; the third has a bad row among them."""
    directory.mkdir(exist_ok=True)
    sources = []
    for i in range(files):
        path = tiny.write_rows(directory / f"r{i}.jsonl", rows(12 + 5 * i, start=100 * i))
        if i == 2:
            path.write_text(path.read_text() + '\n{"text": 1}\n')
        sources.append({"path": str(path), **more})
    return sources


@pytest.fixture
def small_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file be a bundle of its own, so that a few small files keep several workers busy."""
    monkeypatch.setattr("tuner.data.building.documents.BUNDLE_BYTES", 1)
    monkeypatch.setattr("tuner.data.building.spec.MANY_BYTES", 1)


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.slow("all of it", "held out", "half, held out", "repeated", "a count of texts", "unpacked")
@pytest.mark.parametrize("name", WORKED := dict(cases(__file__, "the_number_of_workers_changes_no_byte")))
def test_the_number_of_workers_changes_no_byte(tmp_path: Path, name: str) -> None:
    data = dict(WORKED[name])
    train = several(tmp_path / "rows", 5, **data.pop("train", {}))
    found = []
    for workers in (1, 3):
        request = tiny.request(tmp_path / str(workers), train, workers=workers, on_bad_row="skip", **data)
        found.append(files_of(prepare(request)))
    assert found[0] == found[1]
    assert b'"reason"' in found[0]["prepared/rejects.jsonl"]


@pytest.mark.parametrize("rows_in_a_slice", [1, 7, 64])
def test_how_many_rows_are_encoded_at_a_time_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_in_a_slice: int
) -> None:
    train, found = several(tmp_path / "rows", 5), []
    for cache in ("a", "b"):
        info = prepare(tiny.request(tmp_path / cache, train, eval="10%", workers=1, on_bad_row="skip"))
        found.append(files_of(info))
        monkeypatch.setattr("tuner.data.building.encoded.SLICE_RECORDS", rows_in_a_slice)
    assert found[0] == found[1]
    assert b'"reason"' in found[0]["prepared/rejects.jsonl"]
    with pytest.raises(DataError) as stopped:
        prepare(tiny.request(tmp_path / "c", train, workers=1))
    monkeypatch.undo()
    with pytest.raises(DataError) as expected:
        prepare(tiny.request(tmp_path / "c", train, workers=1))
    assert stopped.value.message == expected.value.message


def test_a_slice_ends_by_its_bytes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tuner.data.building.encoded.SLICE_BYTES", 1000)
    sizes: list[int] = []

    class Counting(Encoder):
        def encode(self, examples: Any, *more: Any) -> Any:
            sizes.append(len(examples))
            return super().encode(examples, *more)

    monkeypatch.setattr("tuner.data.building.encoded.Encoder", Counting)
    prepare(tiny.request(tmp_path / "cache", tiny.write_rows(tmp_path / "r.jsonl", rows(60))))
    assert sum(sizes) == 60
    assert max(sizes) < 12


@pytest.mark.usefixtures("small_bundles")
def test_small_blocks_are_one_bundle_and_shares_part_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = several(tmp_path / "rows", 2)
    held: dict[str, Any] = {"eval": "5 documents", "workers": 1}
    apart = open_prepared(prepare(tiny.request(tmp_path / "a", train, **held)).path)
    monkeypatch.setattr("tuner.data.building.documents.BUNDLE_BYTES", 1 << 20)
    together = open_prepared(prepare(tiny.request(tmp_path / "b", train, **held)).path)
    assert apart.eval is not None
    assert together.eval is not None
    assert len(list(record_batches(apart.path / "train.documents.arrow"))) == 2
    assert len(list(record_batches(together.path / "train.documents.arrow"))) == 1
    assert documents(apart.train) == documents(together.train)
    assert documents(apart.eval) == documents(together.eval)
    assert apart.samples == together.samples
    assert apart.train.trained_per_row.tolist() == together.train.trained_per_row.tolist()
    # Two files or a directory of two: the same bytes, and the same name where nobody asks which source was held out.
    as_one = prepare(tiny.request(tmp_path / "c", [{"path": str(tmp_path / "rows")}], **held))
    directory = tiny.request(tmp_path / "c", [{"path": str(tmp_path / "rows")}])
    assert keys_of(directory).prepared == keys_of(tiny.request(tmp_path / "c", train)).prepared
    assert as_one.key != together.key
    assert (len(together.eval_documents), sum(together.eval_documents)) == (2, 5)
    assert open_prepared(as_one.path).eval_documents == (5,)
    for name in ("train.documents.arrow", "train.rows.arrow", "eval.rows.arrow", "samples.jsonl"):
        assert (as_one.path / name).read_bytes() == (together.path / name).read_bytes()


@pytest.mark.usefixtures("small_bundles")
@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_bad_row_in_order_is_the_error_and_workers_are_gone(tmp_path: Path, workers: int) -> None:
    train, before = several(tmp_path / "rows", 6), children(os.getpid())
    for i, row in ((1, '{"messages": 1}'), (4, "{")):
        path = Path(train[i]["path"])
        path.write_text(path.read_text() + f"\n\n{row}\n")
    with pytest.raises(DataError) as caught:
        prepare(tiny.request(tmp_path / "cache", train, workers=workers))
    assert f"{train[1]['path']}:20:14: messages: " in caught.value.message
    assert children(os.getpid()) == before
    info = prepare(tiny.request(tmp_path / "cache", train, workers=workers, on_bad_row="skip"))
    assert children(os.getpid()) == before
    rejects = [json.loads(line) for line in (info.path / "rejects.jsonl").read_text().splitlines()]
    assert [(Path(r["file"]).name, r["line"]) for r in rejects] == [
        ("r1.jsonl", 20), ("r2.jsonl", 24), ("r4.jsonl", 35)
    ]
    assert rejects[0]["row"] == '{"messages": 1}'
    assert not list((tmp_path / "cache").glob("*/.tmp-*"))


def shares(info: PreparedInfo) -> list[tuple[int, int, int]]:
    return [(s["documents"], s["sampled"], s["repeated"]) for s in info.report["sources"]["train"]]


def test_shares_of_sources_are_exact(tmp_path: Path) -> None:
    files = [tiny.write_rows(tmp_path / f"{i}.jsonl", rows(n, start=100 * i)) for i, n in enumerate((20, 10, 8))]
    train = [
        {"path": str(files[0]), "weight": 0.25}, {"path": str(files[1]), "weight": 2.5},
        {"path": str(files[2]), "count": 3},
    ]
    info = prepare(tiny.request(tmp_path / "cache", train))
    assert shares(info) == [(20, 5, 0), (10, 10, 15), (8, 3, 0)]
    found = Counter(documents(open_prepared(info.path, verify=True).train))
    assert sorted(found.values()) == [1] * 8 + [2] * 5 + [3] * 5
    assert info.report["train"]["documents"] == info.report["train"]["packed_documents"] == 33
    assert info.report["train"]["duplicates"] == 0
    assert info.report["train"]["tokens"] == sum(len(document) * often for document, often in found.items())
    other = prepare(tiny.request(tmp_path / "cache", train, seed=2))
    assert shares(other) == shares(info)
    assert other.key != info.key
    assert Counter(documents(open_prepared(other.path).train)) != found
    # With seeds of their own the samples stay, whatever the recipe's seed and the places of the sources are.
    own = [{**source, "seed": 5} for source in train]
    drawn = [prepare(tiny.request(tmp_path / "cache", given, seed=seed)) for seed, given in ((1, own), (2, own[::-1]))]
    first, second = (Counter(documents(open_prepared(info.path).train)) for info in drawn)
    assert first == second != found
    # More than there are, and documents held out of what is drawn: each once, and none of them trained on.
    more = prepare(tiny.request(tmp_path / "cache", [{"path": str(files[1]), "count": 25}], eval="2 documents"))
    data = open_prepared(more.path)
    assert data.eval is not None
    assert shares(more) == [(10, 10, 15)]
    held, trained = documents(data.eval), Counter(documents(data.train))
    assert len(held) == len(set(held)) == 2
    assert not set(held) & set(trained)
    assert set(trained.values()) == {2, 3}
    nothing = [{"path": str(files[2]), "weight": 0.01}]
    with pytest.raises(DataError, match="no document of 8 is used"):
        prepare(tiny.request(tmp_path / "cache", nothing))
    held_file = prepare(tiny.request(tmp_path / "cache", str(files[0]), eval=[{"path": str(files[1]), "weight": 0.3}]))
    assert held_file.report["eval"]["documents"] == 3


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (0.5, 2.0, 1.3)])
def test_held_out_documents_lie_source_by_source(tmp_path: Path, split: bool, shares: tuple[float, ...]) -> None:
    files = [*several(tmp_path / "rows", 2), {"path": str(tiny.write_rows(tmp_path / "last.jsonl", rows(9, 900)))}]
    sources = [{**source, "weight": share} for source, share in zip(files, shares, strict=True)]
    other = tiny.write_rows(tmp_path / "other.jsonl", [tiny.chat("other", "other")])
    data = {"train": sources, "eval": "12 documents"} if split else {"train": str(other), "eval": sources}
    prepared = open_prepared(prepare(tiny.request(tmp_path / "cache", data.pop("train"), **data)).path)
    of_each = [
        set(documents(open_prepared(prepare(tiny.request(tmp_path / "cache", source["path"])).path).train))
        for source in files
    ]
    assert prepared.eval is not None
    assert sum(prepared.eval_documents) == prepared.manifest["report"]["eval"]["documents"]
    assert all(prepared.eval_documents)
    ends = np.cumsum(prepared.eval_documents)
    for row in prepared.eval:
        ids = np.split(row.input_ids, np.cumsum(row.lengths)[:-1])
        for source, document in zip(np.searchsorted(ends, row.documents, side="right"), ids, strict=True):
            assert tuple(document.tolist()) in of_each[source]


@pytest.mark.parametrize("pairs", [False, True])
def test_rows_of_sources_apart_hold_documents_of_one(tmp_path: Path, pairs: bool) -> None:
    texts = [[f"{name} {i}" + " very" * (i % 9) for i in range(20)] for name in ("hello", "world", "def")]
    made = [
        [{"prompt": "answer", "chosen": text, "rejected": "x"} if pairs else {"text": text} for text in part]
        for part in texts
    ]
    paths = [str(tiny.write_rows(tmp_path / f"{i}.jsonl", rows)) for i, rows in enumerate(made)]
    sources = [{"path": paths[0], "weight": 2.5}, {"path": paths[1], "count": 3}, paths[2]]

    def prepared(**data: Any) -> PreparedInfo:
        request = tiny.request(tmp_path / "cache", sources, pretrain=True, eval="5 documents", **data)
        return prepare(replace(request, examples=DpoMethod().examples) if pairs else request)

    def mixed(info: PreparedInfo) -> int:
        read = [documents([row]) for row in open_prepared(info.path).train]  # type: ignore[arg-type]
        words = [{name for d in row for name in ("hello", "world", "def") if name in decode(d)} for row in read]
        assert all(words)
        return sum(len(found) > 1 for found in words)

    decode = tiny.tokenizer().decode
    together, apart = prepared(), prepared(pack_sources="apart")
    assert (mixed(together) > 0, mixed(apart)) == (True, 0)
    figures = ("packed_documents", "packed_tokens", "packed_trained")
    assert [together.report["train"][f] for f in figures] == [apart.report["train"][f] for f in figures]
    assert together.report["train"]["packed_rows"] < apart.report["train"]["packed_rows"]


class Mismatching:
    """An encoder whose fast half is refuted by the second bundle."""

    def __init__(self, *arguments: Any) -> None:
        self._fast = arguments[3]
        self._own = Encoder(*arguments)
        self._calls = 0

    def encode(self, examples: Any, *more: Any) -> Any:
        self._calls += 1
        if self._fast and self._calls == 2:
            raise FastEncoderMismatch("row 7 differs")
        return self._own.encode(examples, *more)


@pytest.mark.usefixtures("small_bundles")
def test_a_refuted_fast_encoder_starts_the_work_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = several(tmp_path / "rows", 2)
    expected = open_prepared(prepare(tiny.request(tmp_path / "a", train, workers=1)).path)
    said = io.StringIO()
    monkeypatch.setattr("tuner.data.building.encoded.Encoder", Mismatching)
    info = prepare(tiny.request(tmp_path / "b", train, workers=1), Console(stream=said))
    assert info.report["fast_path"] == {"documents": 0, "share": 0.0, "reason": "row 7 differs"}
    assert "the fast encoder is not used: row 7 differs" in said.getvalue()
    assert documents(open_prepared(info.path, verify=True).train) == documents(expected.train)


def test_without_the_fast_encoder_the_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.data.encoding.encode.FAST_FROM_BYTES", 1)
    monkeypatch.setattr("tuner.data.building.documents.FAST_FROM_BYTES", 1)
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(200))
    found = []
    for cache in ("with", "without"):
        info = prepare(tiny.request(tmp_path / cache, path, eval="10%", workers=1))
        files = files_of(info)
        del files["prepared/manifest.json"], files["encoded/manifest.json"]
        found.append((info.key, files, info.report["fast_path"]))
        for name in ("gigatoken", "gigatoken.gigatoken_rs"):
            monkeypatch.setitem(sys.modules, name, None)
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == {"documents": 200, "share": 1.0, "reason": None}
    reason = "gigatoken is not installed: pip install gigatoken==0.10.0"
    assert found[1][2] == {"documents": 0, "share": 0.0, "reason": reason}
    assert ("encoder", f"fast encoder not used: {reason}") in report_lines(info.report, "sft", 256, True)


def test_progress_is_said_now_and_then(tmp_path: Path) -> None:
    said, now = io.StringIO(), [0.0]
    console = Console(stream=said)
    with pace(console, 200_000_000, lambda: now[0]) as add:
        for seconds, done in ((10, 20), (31, 30), (32, 30), (70, 60)):
            now[0] = seconds
            add(done * 1_000_000)
    lines = said.getvalue().splitlines()
    assert [line.split(None, 1)[1] for line in lines] == [
        "25% of 200 MB  1.6 MB/s  1:33 left", "70% of 200 MB  2.0 MB/s  0:30 left"
    ]


def test_an_eval_file_is_read_and_overlap_is_counted(tmp_path: Path) -> None:
    train = tiny.write_rows(tmp_path / "t.jsonl", rows(10))
    held = tiny.write_rows(tmp_path / "e.jsonl", rows(4, start=8))
    info = prepare(tiny.request(tmp_path / "cache", train, eval=str(held)))
    assert info.report["overlap"] == 2
    assert (info.report["train"]["documents"], info.report["eval"]["documents"]) == (10, 4)
    assert "data.eval: 2 of its different documents are in data.train too" in warnings_of(info.report, "")
    tiny.write_rows(train, [*rows(5), *rows(5)])
    same = prepare(tiny.request(tmp_path / "cache", train, eval=str(train))).report
    assert "data.eval: all 10 of its documents are in data.train too" in warnings_of(same, "")


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


def test_short_last_pieces_are_in_no_row(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "a.jsonl", [{"text": "hello world " * n} for n in (23, 38, 50)])
    request = tiny.request(tmp_path / "cache", path, pretrain=True, min_piece_length=60)
    info = prepare(request)
    lengths = [len(view.tokens) % 64 for view in explain(request, 3)]
    assert {len(document) for document in documents(open_prepared(info.path).train)} == {64}
    assert [len(view.kept) % 64 for view in explain(request, 3)] == [0, 0, 0]
    said = dict(report_lines(info.report, "pretrain", 64, True))["train"]
    assert f"no trained token in their {sum(lengths)}, or too few" in said


@pytest.mark.parametrize("fast", [True, False])
def test_texts_of_a_source_go_without_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr("tuner.data.encoding.encode.FAST_FROM_BYTES", 0 if fast else 1 << 60)
    texts = [[f"hello world {name} {i}" for i in range(3)] for name in "ab"]
    paths = [tiny.write_rows(tmp_path / f"{i}.jsonl", [{"text": text} for text in texts[i]]) for i in (0, 1)]
    sources = [{"path": str(paths[0]), "end_token": False}, str(paths[1])]
    request = tiny.request(tmp_path / "cache", sources, pretrain=True, packing=False)
    found = documents(open_prepared(prepare(request).path).train)
    encode = request.tokenizer.encode
    assert sorted(found) == sorted([tuple(encode(a)) for a in texts[0]] + [(*encode(b), 2) for b in texts[1]])
    bare = tiny.request(tmp_path / "cache", [sources[0]], pretrain=True)
    assert [token.rule for view in explain(bare, 1) for token in view.tokens][-1] == "text"


def test_rows_without_target_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [*rows(5), tiny.chat("only a question"), *rows(2, 90)])
    long = prepare(tiny.request(tmp_path / "cache", path, max_length=50)).report["train"]
    assert long["dropped"] == {"no trained token": 1}
    with pytest.raises(DataError, match="nothing is left") as caught:
        prepare(tiny.request(tmp_path / "cache", path, max_length=8))
    assert "data.max_length" in str(caught.value.hint)
    tiny.write_rows(path, [tiny.chat("only a question")])
    with pytest.raises(DataError, match="nothing to train on in 1 row: 1 no trained token"):
        prepare(tiny.request(tmp_path / "cache", path))
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        prepare(tiny.request(tmp_path / "cache", path))
    assert not list((tmp_path / "cache").glob("*/.tmp-*"))


def test_plain_text_that_fits_no_row_is_pretraining_first(tmp_path: Path) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [{"text": "hello world " * 40}])
    with pytest.raises(DataError, match="nothing is left of 1 document:") as caught:
        prepare(tiny.request(tmp_path / "cache", path, max_length=8))
    assert str(caught.value.hint).startswith("write method.kind: pretrain, which splits plain text into rows, or data.")


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
@pytest.mark.parametrize(("row", "columns"), cases(__file__, "foreign_keys_are_named_with_columns_for_the_template"))
def test_foreign_keys_are_named_with_columns_for_the_template(
    row: dict[str, str], columns: str, on_bad_row: str, tmp_path: Path
) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", [row] * 3)
    with pytest.raises(DataError, match=f"r.jsonl:1:1: no .*the row has '{next(iter(row))}', ") as caught:
        prepare(tiny.request(tmp_path / "cache", path, on_bad_row=on_bad_row))
    columns = columns if on_bad_row == "error" else columns.removesuffix("; or ")
    assert f"write the source as {{path: r.jsonl, {columns}" in str(caught.value.hint)


def test_a_line_that_would_break_other_rows_is_not_proposed(tmp_path: Path) -> None:
    asked = {"question": "x", "answer": "y"}
    path = tiny.write_rows(tmp_path / "r.jsonl", [*rows(3), asked])
    with pytest.raises(DataError, match="r.jsonl:4:1: no messages or") as caught:
        prepare(tiny.request(tmp_path / "cache", path))
    assert caught.value.hint == "fix the row, or write data.on_bad_row: skip to leave such rows out"
    assert prepare(tiny.request(tmp_path / "cache", path, on_bad_row="skip")).report["train"]["documents"] == 3
    tiny.write_rows(path, [{"year": 2019}] * 2)  # nothing would be left
    with pytest.raises(DataError) as caught:
        prepare(tiny.request(tmp_path / "cache", path))
    assert caught.value.hint == "fix the rows, of which none can be read so far"


def test_semicolons_between_fields_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("question;answer\nx;y\n")
    with pytest.raises(DataError, match=r"r.csv:1:1: the fields are separated by semicolons: 'question;answer'"):
        prepare(tiny.request(tmp_path / "cache", tmp_path / "r.csv"))


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
    flip_bit(target)
    with pytest.raises(DataError, match="train.rows.arrow"):
        open_prepared(info.path, verify=True)
    target.write_bytes(good[:-9])
    with pytest.raises(DataError, match="train.rows.arrow"):
        open_prepared(info.path)
    said = io.StringIO()
    again = prepare(request, Console(stream=said))
    assert not again.cached
    assert "is damaged; it is built again" in said.getvalue()
    assert target.read_bytes() == good
    for broken in ({}, {"schema": "tuner.prepared/0"}, {"schema": "tuner.prepared/1"}):
        (info.path / "manifest.json").write_text(json.dumps(broken))
        with pytest.raises(DataError, match="not prepared data of this version"):
            open_prepared(info.path)
    with pytest.raises(DataError, match="not a prepared data directory"):
        open_prepared(tmp_path)


@pytest.mark.parametrize("step", cases(__file__, "a_builder_that_dies_leaves_nothing_that_looks_whole"))
def test_a_builder_that_dies_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tiny.write_rows(tmp_path / "r.jsonl", rows(20))
    request = tiny.request(tmp_path / "cache", path, eval="10%")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"tuner.data.building.{step}", die)
        # A killed process does not tidy up: only what a new one does counts.
        patch.setattr("tuner.data.building.cache.discard_dir", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            prepare(request)
    assert find_prepared(request) is None
    info = prepare(request)
    assert not info.cached
    other = prepare(tiny.request(tmp_path / "clean", path, eval="10%"))
    assert files_of(info) == files_of(other)


def test_explain_says_where_a_share_or_what_is_held_out_may_leave_a_row_out(tmp_path: Path) -> None:
    path = str(tiny.write_rows(tmp_path / "r.jsonl", rows(3)))
    for share, held, said in cases(__file__, "explain_says_where_a_share_may_leave_a_row_out"):
        request = tiny.request(tmp_path / "cache", {"path": path, **share}, eval=held)
        assert [view.drawn for view in explain(request, 1)] == [said]


def test_request_resolves_the_length_from_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.write_directory(tmp_path / "model")
    (directory / "config.json").write_text('{"max_position_embeddings": 512}')
    model = ModelSection(name_or_path=str(directory))

    def length(model: ModelSection, **data: Any) -> int:
        section = DataSection.model_validate({"train": "x", **data})
        request = prepare_spec(model, TokenizerSection(), section, SftMethod(), 1)
        assert request.cache_dir == tmp_path / "here"
        return request.max_length

    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "here"))
    section = DataSection.model_validate({"train": "x", "cache_dir": str(tmp_path / "own")})
    assert prepare_spec(model, TokenizerSection(), section, SftMethod(), 1).cache_dir == tmp_path / "own"
    assert length(model) == 512
    assert length(model, max_length=100) == 100
    assert length(ModelSection(name_or_path=str(directory), config={"max_position_embeddings": 4096})) == 2048
    with pytest.raises(RecipeError, match="more than the model's 512 positions"):
        length(model, max_length=513)
    (directory / "config.json").unlink()
    assert length(model) == 2048
