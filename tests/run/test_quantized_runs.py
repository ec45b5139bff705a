"""Runs on a quantised base: stopped and resumed bit for bit, evaluated, and refused where the base is another one."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines, outcome
from tuner.errors import DataError, RecipeError
from tuner.model.quantize import layers
from tuner.run.score import find_trained, score
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo

NF4 = {"model__quantize": "nf4", "train__duration": "4 steps", "checkpoint__every": "3 steps"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainings.prepare(tmp_path_factory.mktemp("quantized"), 1, layers=1)


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_and_evaluated_as_it_was_trained(place: Path) -> None:
    flags = {**NF4, "data__eval": "7 documents", "eval__samples": "1"}
    whole = launch(place, name="whole", **flags).run_dir
    stopped = launch(place, name="parts", train__stop_after="2 steps", **flags)
    assert stopped.step == 2
    again = launch(place, "auto", name="parts", **flags).run_dir
    assert outcome(again) == outcome(whole)
    plain = launch(place, name="plain", train__stop_after="1 step", **{**flags, "model__quantize": "none"}).run_dir
    assert lines(plain)[0]["loss"] != lines(whole)[0]["loss"]
    found = trainings.saved(whole)
    assert found.meta["quantizer"] == {"kind": "nf4", "block": 64, "scales": "float32", "version": 1}
    assert found.meta["frozen_hash"] == trainings.saved(plain).meta["frozen_hash"]
    assert all("codes" not in name and "scales" not in name for name in found.index())
    silent = Console(main=False)
    measured = score(find_trained(whole, silent), trainings.loaded(place, **flags), RankInfo(), silent)
    last = [line for line in lines(whole) if line["kind"] == "eval"][-1]
    assert measured.evaluation.loss == pytest.approx(last["loss"], rel=1e-6)


@pytest.mark.slow
def test_another_base_or_quantiser_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(place, name="refused", train__stop_after="1 step", **NF4)
    with pytest.raises(RecipeError, match="model.quantize nf4 -> int8"):
        launch(place, "auto", name="refused", **{**NF4, "model__quantize": "int8"})
    newer: dict[str, Any] = {**layers.recipe_of("nf4"), "version": 2}
    with monkeypatch.context() as patch, pytest.raises(DataError, match="the base was quantised otherwise"):
        patch.setattr(layers, "recipe_of", lambda kind: newer)
        launch(place, "auto", name="refused", **NF4)
    file = place / "model" / "model.safetensors"
    tensors = load_file(file)
    before = file.read_bytes()
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-6  # it may have the same codes
    save_file(tensors, file, {"format": "pt"})
    try:
        with pytest.raises(DataError, match="the base model changed since this checkpoint was saved"):
            launch(place, "auto", name="refused", **NF4)
    finally:
        file.write_bytes(before)


@pytest.mark.slow
def test_preferences_are_measured_against_the_quantised_base(place: Path) -> None:
    rows = [{"prompt": f"{i} ", "chosen": "ab" * (1 + i % 3), "rejected": "cd" * (1 + i % 2)} for i in range(8)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {}
    for reference in ("adapter_off", "columns"):
        flags = {**NF4, "method__kind": "dpo", "method__reference": reference, "data__train": "pairs.jsonl"}
        flags |= {"train__duration": "2 steps", "train__global_batch_size": "2", "data__cache_dir": "cache"}
        flags |= {"train__micro_batch_size": "2"}
        for kind in ("nf4", "int8"):
            run = launch(place, name=f"{reference}-{kind}", **{**flags, "model__quantize": kind}).run_dir
            trained = lines(run)
            assert trained[0]["loss"] == pytest.approx(0.693147, abs=1e-6), "it begins as its reference"
            meta = trainings.saved(run).meta
            keys[reference, kind] = (meta.get("reference") or {}).get("key")
    assert keys["adapter_off", "nf4"] is None
    assert keys["columns", "nf4"] != keys["columns", "int8"]
