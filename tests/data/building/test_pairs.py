"""Pairs of answers from rows to batches: side by side in one row, whatever is drawn, held out, cut or repeated."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import pairs, tiny
from tests.data.pairs import UNPAIRED, said, spec
from tuner.data.batches import IGNORED, GlobalBatches, collate
from tuner.data.building.bins import pack
from tuner.data.building.documents import explain
from tuner.data.building.prepare import prepare
from tuner.data.building.report import report_lines
from tuner.data.building.rows import partners
from tuner.data.encoding.encode import Encoder
from tuner.data.prepared import PackedRows, PreparedData, open_prepared
from tuner.data.reading.examples import Pair
from tuner.data.reading.records import parse_compared
from tuner.errors import DataError

Document = tuple[tuple[int, ...], tuple[bool, ...]]


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **change: Any) -> tuple[PreparedData, dict[str, Any]]:
    info = prepare(spec(tmp_path, rows, **change))
    return open_prepared(info.path, verify=True), info.report


def documents(rows: PackedRows) -> dict[int, Document]:
    """The documents of rows by their number; those that follow each other in a row are checked to be pairs."""
    found: dict[int, Document] = {}
    for row in rows:
        assert np.array_equal(row.documents[::2] + 1, row.documents[1::2]) and (row.documents[::2] % 2 == 0).all()
        assert len(row.input_ids) <= rows.max_length
        ends = np.cumsum(row.lengths)
        for number, start, end in zip(row.documents.tolist(), ends - row.lengths, ends, strict=True):
            found[number] = (tuple(row.input_ids[start:end].tolist()), tuple(row.trained[start:end].tolist()))
    return found


def expected(row: dict[str, Any]) -> list[Document]:
    """Both documents of a row, each placed by itself as an answer that sft would learn."""
    pair = parse_compared(row, "preference")
    assert isinstance(pair, Pair)
    encoder = Encoder(tiny.tokenizer(), "last_assistant", fast=False)
    placed = [encoder.explain(answer).documents[0] for answer in (pair.chosen, pair.rejected)]
    return [(tuple(d.input_ids.tolist()), tuple(d.trained.tolist())) for d in placed]


def test_both_answers_are_neighbours_in_a_row_as_sft_would_encode_them(tmp_path: Path) -> None:
    rows = pairs.rows(40)
    data, report = prepared(tmp_path, rows)
    found = documents(data.train)
    assert [found[i] for i in range(80)] == [document for row in rows for document in expected(row)]
    for chosen, rejected in zip(range(0, 80, 2), range(1, 80, 2), strict=True):
        prompts = [found[i][0][: found[i][1].index(True)] for i in (chosen, rejected)]
        assert prompts[0] == prompts[1] and len(prompts[0]) > 2
    assert report["train"]["documents"] == report["train"]["packed_documents"] == 40
    lengths = np.array([len(found[i][0]) + len(found[i + 1][0]) for i in range(0, 80, 2)])
    assert report["train"]["packed_rows"] == len(data.train) == len(pack(lengths, 200)[1]) - 1
    assert data.manifest["method"] == "preference"
    margins = [row.get("margin", row["score_chosen"] - 1.5 if "score_chosen" in row else 0) for row in rows]
    assert data.train.columns["margin"].tolist() == np.repeat(np.array(margins, dtype=np.float32), 2).tolist()


def test_batches_have_whole_pairs_with_their_columns_in_any_order(tmp_path: Path) -> None:
    data, _ = prepared(tmp_path, pairs.rows(40))
    seen: list[int] = []
    batches = GlobalBatches(data.train, seed=3, shuffle=True, global_batch_size=4, micro_batch_size=2, by_document=True)
    for i in range(batches.steps_per_epoch):
        step = batches.step(i)
        numbers = np.concatenate([micro.documents for micro in step.micro])
        assert step.documents == len(numbers) == len(step.columns["margin"])
        for micro in step.micro:
            assert np.array_equal(micro.documents[::2] + 1, micro.documents[1::2])
            assert np.array_equal(micro.columns["margin"], data.train.columns["margin"][micro.documents])
        seen += numbers.tolist()
    assert sorted(seen) == list(range(80))


def test_a_pair_is_one_example_to_shares_repeats_and_what_is_held_out(tmp_path: Path) -> None:
    rows = pairs.rows(30)
    source = tiny.write_rows(tmp_path / "own.jsonl", rows)
    whole = {tuple(expected(row)) for row in rows}
    data, report = prepared(tmp_path, [], train=[{"path": str(source), "weight": 1.5}], eval="20%")
    assert data.eval is not None
    splits = [documents(split) for split in (data.train, data.eval)]
    taken = [[(found[i], found[i + 1]) for i in range(0, len(found), 2)] for found in splits]
    assert set(taken[0]) | set(taken[1]) == whole and not set(taken[0]) & set(taken[1])
    assert len(taken[1]) == 6 and sum(data.eval_documents) == 12
    assert len(taken[0]) > len(set(taken[0])) and report["overlap"] == 0
    assert len(data.samples) == 6
    prompts = {tuple(sample.prompt_ids) for sample in data.samples}
    assert prompts == {ids[: trained.index(True)] for pair in taken[1] for ids, trained in pair}
    assert all(set(sample.reference.split()) <= {"yes"} for sample in data.samples)


@pytest.mark.parametrize("max_length", [40, 60])
def test_long_pairs_are_dropped_whole_or_cut_alike(max_length: int, tmp_path: Path) -> None:
    rows = [row for row in pairs.rows(40, words=9) if "prompt" in row and isinstance(row["prompt"], str)]
    rows += [{"prompt": "x " * 40, "chosen": "a", "rejected": "b"}]
    alone = [expected(row) for row in rows]
    fits = [sum(len(ids) for ids, _ in pair) <= max_length for pair in alone]
    assert any(fits) and not all(fits)
    data, report = prepared(tmp_path, rows, max_length=max_length, too_long="drop")
    found = documents(data.train)
    assert sorted(found) == [i for k, fit in enumerate(fits) if fit for i in (2 * k, 2 * k + 1)]
    assert report["train"]["dropped_rows"] == {"longer than max_length": fits.count(False)}
    data, report = prepared(tmp_path, rows, max_length=max_length, too_long="truncate")
    found = documents(data.train)
    assert report["train"]["truncated"] == fits.count(False)
    assert report["train"]["dropped_rows"] == {"no trained token within max_length": 1}
    for k, pair in enumerate(alone[:-1]):
        kept = [found[2 * k + i] for i in (0, 1)]
        assert all(pair[i][0][: len(kept[i][0])] == kept[i][0] for i in (0, 1))
        cut = [len(kept[i][0]) < len(pair[i][0]) for i in (0, 1)]
        size = sum(len(ids) for ids, _ in kept)
        assert any(cut) != fits[k] and (fits[k] or max_length - 1 <= size <= max_length)
        if all(cut):
            assert len(kept[0][0]) == len(kept[1][0])
        elif any(cut):  # the longer one alone, and not below the other
            assert len(kept[cut.index(True)][0]) >= len(kept[cut.index(False)][0])


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_the_last_tokens_of_a_long_prompt_are_kept(too_long: str, tmp_path: Path) -> None:
    rows = [row for row in pairs.rows(40, words=9) if "prompt" in row and isinstance(row["prompt"], str)]
    data, report = prepared(tmp_path, rows, max_length=40, max_prompt_length=6, too_long=too_long)
    found, cut_prompts, long = documents(data.train), 0, 0
    for number, row in enumerate(rows):
        pair = expected(row)
        start = max(0, pair[0][1].index(True) - 6)
        left = [(ids[start:], trained[start:]) for ids, trained in pair]
        cut_prompts += start > 0
        if sum(len(ids) for ids, _ in left) <= 40:
            assert [found[2 * number], found[2 * number + 1]] == left
        else:
            long += 1
            assert (2 * number in found) is (too_long == "truncate")
    counts = report["train"]
    assert (counts["cut_prompts"], counts["truncated"]) == (cut_prompts, long if too_long == "truncate" else 0)


def test_without_packing_a_row_is_a_pair(tmp_path: Path) -> None:
    data, _ = prepared(tmp_path, pairs.rows(7), packing=False)
    assert [row.documents.tolist() for row in data.train] == [[2 * i, 2 * i + 1] for i in range(7)]


def test_pairs_that_are_no_two_answers_are_refused_with_their_place(tmp_path: Path) -> None:
    rows = [*pairs.rows(2), {"prompt": [said("user", "a")], "chosen": "b ", "rejected": "b"}]
    template = tiny.CHATML.replace("message['content']", "message['content'] | trim")
    with pytest.raises(DataError, match=r"rows.jsonl:3:\d+: chosen and rejected become the same tokens"):
        prepare(spec(tmp_path, rows, tokenizer=tiny.tokenizer(template)))
    info = prepare(spec(tmp_path, rows, tokenizer=tiny.tokenizer(template), on_bad_row="skip"))
    assert info.report["train"]["documents"] == 2
    for rejected in (tiny.chat("a", "b"), {**rows[-1], "chosen": "b"}):  # of which nothing at all is encoded
        with pytest.raises(DataError, match="rows.jsonl:1:"):
            prepare(spec(tmp_path, [rejected]))
        with pytest.raises(DataError, match="nothing to train on in 1 row"):
            prepare(spec(tmp_path, [rejected], on_bad_row="skip"))
    escaped = [{"prompt": "a", "chosen": "b", "rejected": "<|im_end|>"}]
    with pytest.raises(DataError, match=r"rejected: the control token <\|im_end\|> appears literally"):
        prepare(spec(tmp_path, escaped))
    # A template that writes answers after the prompt of one caller or of another: these are answers to two prompts.
    opened = "('' if message['role'] == 'user' else 'N' if message['content'] == 'b' else 'T')"
    template = tiny.CHATML.replace("+ message['content']", f"+ {opened} + message['content']")
    asked = "{{ 'N' if enable_thinking is defined and not enable_thinking else 'T' }}"
    template = template.replace("assistant\n' }}{% endif %}", "assistant\n' }}" + asked + "{% endif %}")
    with pytest.raises(DataError, match="writes the prompt of chosen and that of rejected differently"):
        prepare(spec(tmp_path, [{**rows[-1], "chosen": "b", "rejected": "c"}], tokenizer=tiny.tokenizer(template)))


def test_reports_and_warnings_speak_of_pairs(tmp_path: Path) -> None:
    rows = [*pairs.rows(20), *({"prompt": "x " * 90, "chosen": f"a {i}", "rejected": f"b {i}"} for i in range(3))]
    info = prepare(spec(tmp_path, rows, max_length=130))
    [warning] = info.warnings
    assert warning.startswith("data.train: 3 of 23 pairs (13%) are dropped: longer than data.max_length (130); ")
    needed = max(sum(len(ids) for ids, _ in expected(row)) for row in rows)
    assert warning.endswith(f"; data.max_length: {needed} keeps 99% of them whole")
    lines = dict(report_lines(info.report, "preference", 130, True))
    assert lines["masks"] == "verified for all 23 rows used" and lines["train"].startswith("20 pairs  ")
    assert lines["note"] == "pairs with a margin (8)"
    with pytest.raises(DataError, match=r"nothing is left of 20 pairs: 20 longer than max_length \(8\)"):
        prepare(spec(tmp_path, pairs.rows(20), max_length=8))


def test_explain_shows_both_answers(tmp_path: Path) -> None:
    views = list(explain(spec(tmp_path, pairs.rows(2)), 2))
    places = [(view.line, view.document, view.documents) for view in views]
    assert places == [(1, 0, 2), (1, 1, 2), (2, 0, 2), (2, 1, 2)]
    assert "".join(token.text for token in views[1].tokens if token.trained) == " no <|im_end|>"
    assert {token.rule for token in views[2].tokens} == {"prompt", "assistant turn"}


def test_labels_are_columns_and_prompts_borrow_the_answers_of_others(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i // 2}", "completion": f" {'yes' if i % 2 else 'no'} {i}", "label": bool(i % 2)}
        for i in range(12)
    ]
    data, report = prepared(tmp_path, rows, examples=UNPAIRED, eval="4 documents")
    assert report["train"]["documents"] == 8 and data.eval is not None
    labels = data.train.columns["label"]
    assert labels.dtype == np.bool_
    tokenizer = tiny.tokenizer()
    batches = GlobalBatches(
        data.train, seed=1, shuffle=True, global_batch_size=len(data.train), micro_batch_size=1, world_size=2,
        by_document=True, mismatched=True,
    )  # fmt: skip
    step = batches.step(0)
    assert step.documents == 8 == len(step.columns["label"])
    assert len(step.mismatched) == len(step.micro)
    texts: dict[int, str] = {}
    for row in data.train:
        for number, part in zip(row.documents, np.split(row.input_ids, np.cumsum(row.lengths)[:-1]), strict=True):
            texts[int(number)] = tokenizer.decode(part.tolist())
            assert bool(labels[number]) == ("yes" in texts[int(number)])
    prompts = {number: text[: text.index(" ")] for number, text in texts.items()}
    order = sorted(texts)
    for micro, other in zip(step.micro, step.mismatched, strict=True):
        assert np.array_equal(micro.documents, other.documents)
        parts = np.split(other.input_ids, np.cumsum(other.lengths)[:-1])
        for number, ids in zip(other.documents.tolist(), parts, strict=True):
            later = [*order[number + 1 :], *order[:number]]
            partner = next(k for k in later if prompts[k] != prompts[number])
            assert tokenizer.decode(ids.tolist()) == prompts[number] + texts[partner][len(prompts[partner]) :]
        learned = "".join(tokenizer.decode(other.targets[other.targets != IGNORED].tolist()))
        assert "q" not in learned and learned.count("<|im_end|>") == len(other.documents)
    with pytest.raises(DataError, match="all rows have the same prompt"):
        prepare(spec(tmp_path, [{**row, "prompt": "q"} for row in rows], UNPAIRED))


def test_a_partner_is_the_next_document_with_another_prompt() -> None:
    drawn = np.random.default_rng(1)
    for _ in range(200):
        prompts = drawn.integers(0, 3, drawn.integers(1, 9)).astype(np.uint64)
        table = np.stack([prompts, prompts], axis=1)
        found, count = partners(table), len(prompts)
        if len(set(prompts.tolist())) == 1:
            assert found is None
            continue
        after = [[(i + k) % count for k in range(1, count)] for i in range(count)]
        wanted = [next(k for k in others if prompts[k] != prompts[i]) for i, others in enumerate(after)]
        assert found is not None and found.tolist() == wanted


def test_a_filler_of_mismatched_answers_counts_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": f" a{i}", "label": i % 2} for i in range(3)]
    data, _ = prepared(tmp_path, rows, examples=UNPAIRED, packing=False)
    batches = GlobalBatches(
        data.train, seed=1, shuffle=False, global_batch_size=3, micro_batch_size=1, rank=1, world_size=2,
        mismatched=True,
    )  # fmt: skip
    step = batches.step(0)
    empty = [not len(micro.documents) for micro in step.micro]
    assert any(empty) and [not len(batch.documents) for batch in step.mismatched] == empty
    fillers = [batch for batch in step.mismatched if not len(batch.documents)]
    assert all(not len(batch.trained_positions) and not len(batch.columns["label"]) for batch in fillers)
    (tmp_path / "pairs").mkdir()
    paired, _ = prepared(tmp_path / "pairs", pairs.rows(2))
    with pytest.raises(DataError, match="have no partners"):
        paired.train.mismatched(paired.train.row(0))
    assert collate([data.train.row(0)]).columns["partner"].tolist() == [1]
