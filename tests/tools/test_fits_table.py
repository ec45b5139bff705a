"""Cells of what fits where in words, and only those that are missing are predicted."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools import fits_table
from tools.fits_table import COUNTS, DEVICES, LENGTHS, METHODS, MODELS, SHORT_ROWS, Cell, cells, page, text_of


def test_a_cell_in_words(tmp_path: Path) -> None:
    line = {
        "fits": True, "peak_gib": 20.3, "host_gib": 61.2, "tok_per_s": 1234,
        "overrides": {
            "train.micro_batch_size": 2, "train.gradient_checkpointing": "full", "optimizer.offload": "host",
            "optimizer.state": "8bit", "parallel.shard": "full", "parallel.reshard_after_forward": True,
        },
    }  # fmt: skip
    said = "2 rows, full recompute, states on the host, 8-bit states*, sharded: 20.3 GiB + 61 of the host, 1,234 tok/s"
    assert text_of(line) == said
    assert text_of({**line, "fits": False}) == "does not fit"
    recipe = Cell("8B (Qwen3)", "4-bit LoRA", 4096, "24 GB", 1).recipe(tmp_path)
    assert (recipe.adapter.kind, recipe.model.quantize, recipe.data.max_length) == ("lora", "nf4", 4096)


def test_only_what_is_missing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_group(group: list[Cell]) -> list[dict[str, Any]]:
        asked.extend(cell.name for cell in group)
        return [{**fits_table.asdict(cell), "fits": False, "overrides": {}} for cell in group]

    monkeypatch.setattr(fits_table, "FIGURES", tmp_path / "fits.json")
    monkeypatch.setattr(fits_table, "run_group", run_group)
    monkeypatch.setattr("sys.argv", ["fits_table.py", "run", "--only", "1B (Llama 3.2), full, rows of 4,096, 1 x"])
    assert fits_table.main() == 0 and len(asked) == len(DEVICES)
    assert fits_table.main() == 0 and len(asked) == len(DEVICES)


def test_the_page_has_every_cell() -> None:
    lines = [{**fits_table.asdict(cell), "fits": False, "overrides": {}} for cell in cells()]
    rows = len(MODELS) * len(METHODS)
    assert len(lines) == rows * len(DEVICES) * (len(COUNTS) * len(LENGTHS) + len(SHORT_ROWS))
    assert page(lines).count("does not fit") == rows * len(DEVICES) * len(COUNTS) * len(LENGTHS)
    assert page(lines).count("none of these") == rows * len(SHORT_ROWS)


def test_of_short_rows_the_smallest_device_is_named() -> None:
    fitting = {"overrides": {}, "peak_gib": 20.0, "host_gib": 0.0, "tok_per_s": 9}
    group = [cell for cell in cells() if cell.length in SHORT_ROWS and cell.method == "LoRA" and "8B" in cell.model]
    memories = ("16 GB", "24 GB")
    lines = [{**asdict(c), **fitting, "fits": c.memory == "24 GB"} for c in group if c.memory in memories]
    assert page(lines).count("**24 GB**: 1 row: 20.0 GiB, 9 tok/s") == len(SHORT_ROWS)
    assert "none of these" not in page(lines[:1]), "other devices have not been asked"
