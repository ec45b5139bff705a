"""Predictions of whole recipes: devices that are not here, data that is not prepared, several machines.

A model whose layers are alike is predicted from two with fewer of them, as if it were traced whole.
"""

import json
import re
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.model.cuda_branch import config_of
from tests.model.tiny import tiny_config
from tuner.config.load import load_recipe
from tuner.config.recipe import Recipe
from tuner.data.building.prepare import prepare
from tuner.data.building.spec import prepare_spec
from tuner.errors import RecipeError
from tuner.model.build import meta_model
from tuner.profile.devices import devices, find_device, parse_memory, parse_processes
from tuner.profile.predict import Target, layers_alike, predict, predict_by_layers, with_layers
from tuner.profile.prediction import Prediction
from tuner.profile.workload import added_ids
from tuner.runtime.dist import RankInfo

MIB = 1 << 20


def wish(directory: Path, **sections: dict[str, Any]) -> Recipe:
    """A recipe of a directory that holds a config alone."""
    tiny_config("llama").save_pretrained(directory / "base")
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(directory / "base")},
        "data": {"train": str(directory / "rows.jsonl"), "max_length": 64},
        "train": {"global_batch_size": 8, "precision": "fp32"},
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return load_recipe(tree).recipe


def predicted(recipe: Recipe, device: str = "cpu", limit: int = 1 << 34, processes: str = "1") -> Prediction:
    machines, each = parse_processes(processes)
    return predict(recipe, Target(find_device(device), RankInfo(0, machines * each, 0, each), limit))


def foreseen(device: str = "cpu", limit: int = 1 << 34, processes: str = "1", **sections: dict[str, Any]) -> Prediction:
    """The prediction of a wish whose data are not there, made once for all tests that look at it."""
    return _foreseen(device, limit, processes, json.dumps(sections, sort_keys=True))


@cache
def _foreseen(device: str, limit: int, processes: str, sections: str) -> Prediction:
    with TemporaryDirectory() as directory:
        return predicted(wish(Path(directory), **json.loads(sections)), device, limit, processes)


def test_a_directory_with_a_config_alone_is_enough() -> None:
    found = foreseen()
    assert found.verdict == "fits" and "data is not prepared" in found.assumptions[0]
    assert found.time.total_steps is None and found.time.tokens_per_step == 8 * 64
    assert found.memory.peak_of("evaluation") is None
    assert {"build", "forward", "backward", "optimizer", "saving", "resuming"} == {
        moment.phase for moment in found.memory.moments
    }
    assert foreseen(data={"eval": "2%"}, eval={"samples": 0}).memory.peak_of("evaluation") is not None


def test_the_copy_of_a_save_is_counted_where_it_is_kept() -> None:
    copied, at_once = foreseen(checkpoint={"async_save": True}), foreseen()  # on a CPU it is not copied by itself
    state = copied.memory.peak.parts["parameters"] + copied.memory.peak.parts["optimizer"]
    assert copied.peak_bytes - at_once.peak_bytes == copied.memory.peak.parts["staging"]
    assert 0.9 * state < copied.memory.peak.parts["staging"] < 1.2 * state


def test_the_copy_of_a_save_lies_in_the_hosts_memory_where_training_is_on_a_gpu() -> None:
    found = on_a_small_card()
    assert found.memory.peak.parts["staging"] == 0
    assert any("page-locked" in text for text in found.assumptions)


@pytest.mark.slow
def test_states_on_the_host_are_none_of_the_device(tmp_path: Path) -> None:
    def on(offload: str, processes: str = "1", device: str = "h100-80g", **sections: dict[str, Any]) -> Any:
        recipe = wish(tmp_path, optimizer={"offload": offload}, **sections)
        return predicted(recipe, device, 80 << 30, processes).memory

    device, host, two = on("none"), on("host"), on("host", "1x2")
    weights = device.peak.parts["parameters"]  # all trained, in float32
    assert 2 * weights <= device.peak.parts["optimizer"] < 2.1 * weights
    assert "optimizer" not in device.host
    assert host.peak.parts["optimizer"] < 0.1 * weights
    assert 3.9 * weights < host.host["optimizer"] < 4.1 * weights, "two moments, and buffers as large as a small model"
    assert host.peak.parts["other"] <= device.peak.parts["other"]
    assert two.host["optimizer"] < 0.6 * host.host["optimizer"]
    copied = host.host["staging"]
    assert 0.9 * weights < copied < 1.1 * weights, "what lies there is not copied"
    here = on("host", device="cpu")
    assert here.peak.parts["optimizer"] > 3.9 * weights and not here.host


def test_answers_to_samples_are_counted_at_their_longest() -> None:
    few, many = (foreseen(data={"eval": "2%"}, eval={"samples": n}).memory for n in (0, 16))
    evaluations = few.peak_of("evaluation"), many.peak_of("evaluation")
    assert evaluations[0] is not None and evaluations[1] is not None
    config = tiny_config("llama")
    head = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4
    assert evaluations[1].total - evaluations[0].total > 16 * 63 * token * 0.8
    assert few.peak_of("backward") == many.peak_of("backward")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param("deepseek", "flash attention 2", marks=pytest.mark.slow),
        ("gemma2", "tuner's Triton kernel: scores have a soft cap"),
    ],
)
def test_every_kind_of_heads_is_predicted_on_a_gpu(kind: str, said: str, tmp_path: Path) -> None:
    """Values narrower than keys in widths that are no multiple of 8, and capped scores."""
    config_of(kind).save_pretrained(tmp_path / "model")
    recipe = wish(tmp_path, model={"name_or_path": str(tmp_path / "model")}, train={"precision": "bf16"})
    found = predicted(recipe, "h100-80g", 80 << 30)
    assert found.verdict == "fits"
    assert f"attention is computed by {said}" in found.assumptions


def test_rows_of_added_tokens_are_counted(tmp_path: Path) -> None:
    lora = {"adapter": {"kind": "lora"}}
    without = foreseen(**lora).memory.peak.parts
    found = predicted(wish(tmp_path, **lora, tokenizer={"name_or_path": "byte", "add_tokens": ["<a>", "<b>"]}))
    config = tiny_config("llama")
    rows = 2 * 2 * config.hidden_size * 4  # in the embeddings and in the output layer
    assert found.memory.peak.parts["parameters"] - without["parameters"] == rows
    assert found.memory.peak.parts["optimizer"] - without["optimizer"] == pytest.approx(2 * rows, rel=0.02)
    assert not any("tokenizer is not here" in text for text in found.assumptions)


@pytest.mark.slow
def test_without_its_tokenizer_all_added_tokens_are_new_to_the_model(tmp_path: Path) -> None:
    lora = {"adapter": {"kind": "lora"}}
    found, absent = (
        predicted(wish(tmp_path, **lora, tokenizer={"name_or_path": name, "add_tokens": ["<a>", "<b>"]}))
        for name in ("byte", "absent")
    )
    assert any("tokenizer is not here" in text for text in absent.assumptions)
    grown = absent.memory.peak.parts["parameters"] - found.memory.peak.parts["parameters"]
    assert grown == 2 * 2 * tiny_config("llama").hidden_size * 4  # of the frozen weight, which such ids make longer


def test_ids_of_a_tokenizer_that_is_not_here_come_after_the_models(tmp_path: Path) -> None:
    config, absent = tiny_config("llama"), {"name_or_path": "absent", "add_tokens": ["<a>", "<b>"]}
    ids, (said,) = added_ids(wish(tmp_path, tokenizer=absent), config)
    assert ids == range(config.vocab_size, config.vocab_size + 2) and "tokenizer is not here" in said


@pytest.mark.slow
def test_each_lever_moves_the_memory_it_is_for() -> None:
    plain = foreseen().memory.peak
    again = foreseen(train={"gradient_checkpointing": "full"}).memory.peak
    more = foreseen(train={"micro_batch_size": 4}).memory.peak
    lora = foreseen(adapter={"kind": "lora"}).memory.peak
    four = foreseen(processes="2x2")
    spread = four.memory.peak
    assert spread.parts["constants"] > plain.parts["constants"]
    assert any("gloo's threads may hold" in text for text in four.assumptions)
    assert again.total < plain.total < more.total
    assert lora.parts["gradients"] < plain.parts["gradients"]
    assert spread.parts["optimizer"] < 0.6 * plain.parts["optimizer"]


def on_a_small_card() -> Prediction:
    """On an H100 of too little memory."""
    return foreseen("h100-80g", 600 * MIB, checkpoint={"async_save": True})


@pytest.mark.slow
def test_a_device_that_is_not_here() -> None:
    found = foreseen("h100-80g", 80 << 30, "1x2", train={"precision": "bf16"})
    assert (found.device, found.processes) == ("NVIDIA H100 SXM", 2) and found.verdict == "fits"
    parts = found.memory.peak.parts
    assert parts["constants"] == 1000 * MIB and parts["staging"] == 0 and parts["rounding"] > 0
    assert any("compiled" in text for text in found.assumptions)
    assert "data sheet" in found.time.basis
    assert on_a_small_card().verdict == "does not fit"


@pytest.mark.slow
def test_prepared_rows_are_looked_at(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(5, 5 + n))} for n in (60, 40, 20, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = wish(tmp_path, data={"packing": False}, method={"kind": "pretrain"}, tokenizer={"name_or_path": "byte"})
    before = predicted(recipe)
    request = prepare_spec(recipe.model, recipe.tokenizer, recipe.data, recipe.method, recipe.seed)
    prepare(request)
    found = predicted(recipe)
    assert "of the 4 prepared rows" in found.assumptions[0]
    assert found.time.total_steps == 1
    assert found.time.tokens_per_step == 8 * 150 / 4
    assert found.peak_bytes < before.peak_bytes


@pytest.mark.parametrize(("text", "means"), [("8", (1, 8)), ("4x8", (4, 8))])
def test_processes(text: str, means: tuple[int, int]) -> None:
    assert parse_processes(text) == means


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for text in ("0", "x8", "8x", "2x-1", "many"):
        with pytest.raises(RecipeError, match="--processes"):
            parse_processes(text)
    with pytest.raises(RecipeError, match="h100") as caught:
        find_device("h100")
    assert "h100-80g" in str(caught.value.hint)
    with pytest.raises(RecipeError, match="--memory"):
        parse_memory("--memory", "much")
    for text, meant in (("24", "24GiB"), ("1.5", "1.5GiB"), ("25769803776", "25769803776B")):
        with pytest.raises(RecipeError, match=f"^--fit {text}: {text} what\\? write {meant}$"):
            parse_memory("--fit", text)
    with pytest.raises(RecipeError, match="do not divide"):
        predicted(wish(tmp_path), processes="3")
    assert all(device.memory_bytes > 14 << 30 and (device.flops or 0) > 5e13 for device in devices().values())


LAYERS = 14
OFFLOADED: dict[str, Any] = {
    "train": {"gradient_checkpointing": "full", "offload_activations": True, "precision": "bf16", "micro_batch_size": 2}
}
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("cpu", 1, {"train": {"micro_batch_size": 2}}),
    ("h100-80g", 4, {"train": {"gradient_checkpointing": "full", "precision": "bf16", "global_batch_size": 4}}),
    ("h100-80g", 4, {"train": {"gradient_checkpointing": "full", "precision": "bf16"}, "adapter": {"kind": "lora"}}),
    ("h100-80g", 4, OFFLOADED),
    ("h100-80g", 4, {**OFFLOADED, "adapter": {"kind": "lora"}}),
    ("h100-80g", 1, OFFLOADED),
    ("h100-80g", 4, {**OFFLOADED, "optimizer": {"offload": "host"}}),
)
QUICK = (CASES[3],)


@pytest.mark.parametrize(
    ("device", "processes", "sections"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_it_is_the_prediction_of_the_whole_model(
    device: str, processes: int, sections: dict[str, Any], tmp_path: Path
) -> None:
    model = {"init": "random", "config": {"num_hidden_layers": LAYERS}}
    recipe = wish(tmp_path, **{**sections, "model": model})
    target = Target(find_device(device), RankInfo(0, processes, 0, processes), 1 << 36)
    quick, whole = predict_by_layers(recipe, target, LAYERS), predict(recipe, target, layers=LAYERS)
    assert asked_of(quick) == asked_of(whole)
    assert asdict(quick.time.traffic) == asdict(whole.time.traffic)
    assert quick.time.step_s == pytest.approx(whole.time.step_s, rel=1e-6)


def asked_of(prediction: Prediction) -> dict[tuple[str, str], int]:
    """The most that is asked of the allocator in each phase, by any layer and by each module outside of them.

    What it holds beyond that comes in segments of 2 MiB, which do not grow evenly.
    """
    most: Counter[tuple[str, str]] = Counter()
    for moment in prediction.memory.moments:
        at = moment.phase, re.sub(r"layers\.\d+", "any layer", moment.module)
        most[at] = max(most[at], moment.total - moment.parts["rounding"])
    return most


def test_layers_are_alike_or_not() -> None:
    assert layers_alike(meta_model(tiny_config("llama"), torch.float32)) == tiny_config("llama").num_hidden_layers
    assert layers_alike(meta_model(tiny_config("gemma3"), torch.float32)) == 0  # two kinds of attention
    assert with_layers(tiny_config("qwen3"), 1).num_hidden_layers == 1


def test_few_layers_are_predicted_whole(tmp_path: Path) -> None:
    recipe, target = wish(tmp_path), Target(find_device("cpu"), RankInfo(), 1 << 34)
    assert predict_by_layers(recipe, target, 2).memory == foreseen().memory


@pytest.mark.slow
@pytest.mark.parametrize(("level", "adapter"), [("full", "none"), ("full", "lora"), ("selective", "lora")])
def test_what_the_allocator_rounds_is_not_multiplied_by_the_layers(level: str, adapter: str, tmp_path: Path) -> None:
    layers = 7
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = {**shape, "head_dim": 64, "num_hidden_layers": layers, "max_position_embeddings": 4096}
    sections: dict[str, Any] = {
        "model": {"init": "random", "config": config},
        "adapter": {"kind": adapter},
        "data": {"max_length": 4096},
        "train": {"gradient_checkpointing": level, "precision": "bf16", "micro_batch_size": 1},
    }
    recipe, target = wish(tmp_path, **sections), Target(find_device("h100-80g"), RankInfo(0, 8, 0, 8), 1 << 36)
    quick, whole = (predict_by_layers(recipe, target, layers), predict(recipe, target))
    assert quick.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.01)
