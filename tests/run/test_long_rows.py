"""Whole runs that compute otherwise, with inputs on the host and tiles, in fp16, with row-wise updates and on a
quantised base: resumed bit for bit, and what is said.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.fixtures import trainings
from tests.fixtures.trainings import in_parts, launch, lines, outcome, saved
from tuner.api.exports import export_hf
from tuner.checkpoint.load import read_tensors
from tuner.config.load import load_recipe
from tuner.errors import DataError, RecipeError
from tuner.model import tiles
from tuner.model.quantize import layers
from tuner.run.options import LaunchOptions
from tuner.run.score import find_trained, score
from tuner.runtime import memory
from tuner.runtime.console import Console
from tuner.runtime.dist import RankInfo
from tuner.train.loss_scale import LOSS_SCALE

LONG = {
    "train__gradient_checkpointing": "full", "train__offload_activations": "true", "train__tiled_mlp": "true",
    "train__duration": "3 steps",
}  # fmt: skip
WITHOUT_DROPOUT = {"adapter__dropout": "0"}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "LEAST", 8)


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit(workplace: Path) -> None:
    whole = outcome(launch(workplace, name="whole", **LONG).run_dir)
    assert outcome(in_parts(workplace, "2 steps", **LONG)) == whole
    assert whole["sha256"] is not None


def test_losses_are_the_plain_runs(workplace: Path) -> None:
    def losses(name: str, **flags: str) -> list[float]:
        run = launch(workplace, name=name, **WITHOUT_DROPOUT, **flags).run_dir
        return [line["loss"] for line in lines(run) if line["kind"] == "train"]

    plain = losses("plain", train__duration="3 steps")
    assert losses("long", **LONG) == pytest.approx(plain, rel=1e-6)


def test_the_start_says_what_the_host_holds(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}
    monkeypatch.setattr(Console, "say", lambda console, label, text, *rest: said.update({label: text}))
    launch(workplace, LaunchOptions(dry_run=True), schedule__warmup="50 steps", **LONG)
    assert said["plan"].endswith(" · lr up to 6e-05 of 0.001")
    assert said["warning"].startswith("schedule.warmup: 50 steps is longer than the run of 3 steps: ")
    assert said["offload"] == (
        "the inputs of recomputed layers are kept on the host: up to 4.0 MiB a process, which saves nothing on a CPU"
    )


@pytest.mark.parametrize("level", ["none", "auto"])
def test_without_recomputing_there_is_nothing_to_keep_on_the_host(level: str) -> None:
    train = {"gradient_checkpointing": level, "offload_activations": True}
    with pytest.raises(RecipeError, match="moves the inputs of recomputed layers; set train.gradient_checkpointing"):
        load_recipe({"model": {"name_or_path": "m"}, "data": {"train": "rows.jsonl"}, "train": train})


def test_routers_with_a_loss_are_refused_by_name(workplace: Path) -> None:
    flags: dict[str, Any] = {"model__router_aux_loss_coef": "0.01", **LONG}
    with pytest.raises(RecipeError, match="train.tiled_mlp: layers whose routers have a loss"):
        launch(workplace, **flags)


@pytest.mark.parametrize("has_room", [True, False])
def test_steps_keep_what_they_free_where_there_is_room(
    has_room: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(memory, "keep_freed_memory", lambda size: asked.append("keep") is None)
    monkeypatch.setattr(memory, "return_freed_memory", lambda: asked.append("return") is None)
    monkeypatch.setattr(memory, "_own_limits", lambda: [] if has_room else [1 << 20])
    launch(workplace, train__duration="2 steps")
    assert asked == (["return", "keep"] if has_room else ["return"])


STEPS = 3
KEYS = {"train__precision": "fp16", "train__duration": f"{STEPS} steps", "checkpoint__every": "never"}


def test_it_resumes_at_every_step_bit_for_bit(workplace: Path) -> None:
    launch(workplace, name="whole", **KEYS)
    for _ in range(STEPS):
        launch(workplace, "auto", name="parts", train__stop_after="1 step", **KEYS)
    whole, parts = workplace / "runs" / "whole", workplace / "runs" / "parts"
    assert outcome(whole) == outcome(parts)
    assert [line["loss_scale"] for line in lines(parts)] == [65536.0] * STEPS
    assert dict(read_tensors(saved(parts)))[LOSS_SCALE].tolist() == [65536.0, STEPS]


RECIPE = """\
model: {name_or_path: ./model}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 64, packing: false}
train: {duration: 3 steps, global_batch_size: 4, micro_batch_size: 2, precision: fp32, device: cpu}
optimizer: {lr: 1e-2, weight_decay: 0.1, rows: [embed_tokens]}
checkpoint: {every: 4 steps}
logging: {level: warning}
"""
NAME = "model.embed_tokens.weight"


@pytest.fixture
def directory(workplace: Path) -> Path:
    config = LlamaConfig.from_pretrained(workplace / "model", tie_word_embeddings=False)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(workplace / "model")
    (workplace / "r.yaml").write_text(RECIPE)
    return workplace


def test_a_run_that_was_stopped_is_one_that_was_not(directory: Path) -> None:
    whole = launch(directory, name="whole")
    parts = in_parts(directory, "2 steps")
    assert outcome(parts) == outcome(whole.run_dir)
    tensors = dict(read_tensors(saved(parts)))
    before = LlamaForCausalLM.from_pretrained(directory / "model").state_dict()[NAME]
    counts = tensors[f"optimizer/row_updates/{NAME}"]
    untouched = counts == 0
    assert untouched.sum() > 200 and counts.max() == 3, "bytes that no row has, and one that every step has"
    assert torch.equal(tensors[f"model/{NAME}"][untouched], before[untouched])
    assert not torch.equal(tensors[f"model/{NAME}"], before)
    assert not tensors[f"optimizer/exp_avg/{NAME}"][untouched].any()
    exported = AutoModelForCausalLM.from_pretrained(export_hf(parts, dtype="fp32").path).state_dict()
    assert torch.equal(exported[NAME], tensors[f"model/{NAME}"])
    dense = launch(directory, name="dense", optimizer__rows="[]", train__stop_after="1 step")
    assert lines(dense.run_dir)[0]["grad_norm"] == pytest.approx(lines(whole.run_dir)[0]["grad_norm"], rel=1e-6)
    with pytest.raises(RecipeError, match="optimizer.rows"):
        launch(directory, "auto", name="parts", optimizer__rows="[]", train__duration="4 steps")


NF4 = {"model__quantize": "nf4", "train__duration": "4 steps", "checkpoint__every": "3 steps"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trainings.prepare(tmp_path_factory.mktemp("quantized"), 1, layers=1)


@pytest.mark.slow
def test_a_run_is_resumed_bit_for_bit_and_evaluated_as_it_was_trained(place: Path) -> None:
    flags = {**NF4, "data__eval": "7 documents", "eval__samples": "1"}
    whole = launch(place, name="whole", **flags).run_dir
    assert outcome(in_parts(place, "2 steps", **flags)) == outcome(whole)
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
    newer: dict[str, Any] = {**layers.QuantizeSpec("nf4").facts(), "version": 2}
    with monkeypatch.context() as patch, pytest.raises(DataError, match="the base was quantised otherwise"):
        patch.setattr(layers.QuantizeSpec, "facts", lambda _: newer)
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
