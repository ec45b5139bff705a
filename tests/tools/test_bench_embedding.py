"""The comparison of a large embedding takes real steps both ways, of the same tokens, and counts what they hold."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tools.bench_embedding import LENGTH, Worker, peak_bytes, write_model


@pytest.mark.slow
def test_both_ways_take_the_same_step_and_differ_in_what_they_hold(tmp_path: Path) -> None:
    vocabulary, width = 4096, 16
    write_model(tmp_path, vocabulary, width)
    options = Namespace(tokens=2 * LENGTH, skew=0.0, vocabulary=vocabulary)
    dense, rows = (Worker(tmp_path, way, options) for way in ("dense", "rows"))
    found = [worker.step() for worker in (dense, rows)]
    assert found[0]["rows"] == found[1]["rows"] > LENGTH
    assert {"step", "forward", "backward", "optimizer"} <= found[0].keys()
    held, left = dense.bytes_held(), rows.bytes_held()
    table, room = vocabulary * width * 4, 2 * LENGTH
    assert held["gradients"] - left["gradients"] == table - room * (width * 4 + 8) - (vocabulary + 1) * 4
    assert 0 < left["states"] - held["states"] < 4 * vocabulary
    assert peak_bytes() > 0
