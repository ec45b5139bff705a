"""A model whose layers are alike is predicted from two with fewer of them, as if it were traced whole."""

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.tiny import tiny_config
from tests.profile.test_predict import foreseen, wish
from tuner.model.build import meta_model
from tuner.profile.devices import find_device
from tuner.profile.predict import Target, layers_alike, predict, predict_by_layers, with_layers
from tuner.profile.prediction import Prediction
from tuner.runtime.dist import RankInfo

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
