"""What is left out of a trace is like what is in it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.profile.test_predict import predicted, wish
from tuner.model import tiles
from tuner.model.quantize import product
from tuner.model.quantize.rows import fill
from tuner.profile import tracing
from tuner.profile.prediction import Prediction

LORA: dict[str, Any] = {"adapter": {"kind": "lora"}}
TILES = 6
TILE = tiles.LEAST


def tensors(prediction: Prediction) -> set[tuple[Any, ...]]:
    """The bytes of every moment by phase, module and part: those of tiles that are alike are one."""
    return {
        (moment.phase, moment.module, *((part, size) for part, size in moment.parts.items() if part != "rounding"))
        for moment in prediction.memory.moments
    }


@pytest.mark.parametrize(
    ("device", "sections"),
    [("h100-80g", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("h100-80g", LORA), ("cpu", LORA)])],
)
def test_a_few_tiles_need_what_all_of_them_need(
    device: str, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = TILES * TILE - 40  # tiles are of nearly one size, and the last is the smallest
    config = {"num_hidden_layers": 2, "max_position_embeddings": length}
    train = {
        "tiled_mlp": True,
        "gradient_checkpointing": "full",
        "precision": "bf16",
        "micro_batch_size": 1,
        "global_batch_size": 1,
    }
    given = {"model": {"init": "random", "config": config}, "data": {"max_length": length}, "train": train, **sections}
    recipe = wish(tmp_path, **given)
    few = predicted(recipe, device)
    monkeypatch.setattr(tracing, "TILES", TILES)
    every = predicted(recipe, device)
    assert len(every.memory.moments) > len(few.memory.moments)
    assert tensors(few) == tensors(every) and few.peak_bytes == every.peak_bytes
    assert few.time == every.time and (few.time.traffic.converted > 0 or device == "cpu")


@pytest.mark.parametrize("device", ["h100-80g", pytest.param("cpu", marks=pytest.mark.slow)])
def test_a_few_tiles_of_a_quantised_weight_need_what_all_of_them_need(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 64 * TILES}
    model = {"init": "random", "config": config, "quantize": "nf4"}
    monkeypatch.setattr(product, "TILE_BYTES", {"cpu": 1 << 15, "cuda": 1 << 15})  # 64 rows or columns
    made: Counter[str] = Counter()
    monkeypatch.setattr(product, "fill", lambda *given: made.update([given[0].device.type]) or fill(*given))
    recipe = wish(tmp_path, model=model, train={"precision": "bf16"}, **LORA)
    few, those = predicted(recipe, device), made.total()
    monkeypatch.setattr(tracing, "TILES", TILES)
    every = predicted(recipe, device)
    assert made.total() - those > those > 0
    assert few.memory == every.memory and few.time == every.time
