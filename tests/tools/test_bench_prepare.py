"""The parts of the benchmarks that could make a figure wrong: what counts as equal, distinct rows, peaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data import tiny
from tools import bench_rows, prepare_rss
from tools.bench_digests import digests, prepared_digests
from tuner import prepare_data


def test_a_digest_is_of_the_ids_and_the_mask() -> None:
    ids, trained, offsets = np.array([1, 2, 3, 1, 2, 3]), np.array([False, True, True] * 2), np.array([0, 3, 6])
    first, second = digests(ids, trained, offsets)
    assert first == second
    assert digests(ids.astype(np.uint16), trained, offsets) == [first, second]
    for change in (np.array([1, 2, 4]), np.array([2, 1, 3])):
        assert digests(change, trained[:3], offsets[:2]) != [first]
    assert digests(ids[:3], np.array([True, True, True]), offsets[:2]) != [first]
    assert digests(ids[:2], trained[:2], np.array([0, 2])) != [first]


@pytest.mark.slow
def test_digests_of_a_prepared_directory(tmp_path: Path) -> None:
    tiny.write_directory(tmp_path / "model")
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [tiny.chat(f"q {i}", f"a {i}") for i in range(5)])
    prepared = prepare_data({"model": {"name_or_path": str(tmp_path / "model")}, "data": {"train": str(rows)}}).path
    with pa.ipc.open_stream(prepared / "train.documents.arrow") as stream:
        table = stream.read_all()
    ids = [np.array(row) for row in table.column("input_ids").to_pylist()]
    masks = [np.array(row) for row in table.column("trained").to_pylist()]
    offsets = np.cumsum([0, *map(len, ids)])
    assert prepared_digests(prepared) == digests(np.concatenate(ids), np.concatenate(masks), offsets)
    assert len(set(prepared_digests(prepared))) == 5


@pytest.mark.slow
def test_rows_are_distinct_and_end_with_an_answer(tmp_path: Path) -> None:
    count, written = bench_rows.write(bench_rows.endless(), tmp_path / "rows.jsonl", 100_000)
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert (len(lines), sum(len(line.encode()) + 1 for line in lines)) == (count, written)
    assert 90_000 < written <= 100_000
    assert len(set(lines)) == count
    for line in lines:
        roles = [message["role"] for message in json.loads(line)["messages"]]
        assert roles[-2:] == ["user", "assistant"]


HOLDER = "held = bytearray(1) * 60_000_000; print(1); input()"


def test_peaks_of_a_tree() -> None:
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDER!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        pids = prepare_rss.tree(process.pid)
        assert len(pids) == 2
        peaks = [prepare_rss.peak_mb(pid) for pid in pids]
        assert process.stdin is not None
        process.communicate("\n")
    assert peaks[1] > 50 > peaks[0] > 1
    assert prepare_rss.peak_mb(process.pid) == 0
    assert prepare_rss.peak_mb(os.getpid()) > 50
