"""What is left out of a trace is like what is in it.

Products with quantised weights are predicted to hold what they hold: a tile, and what torch makes a tile of.
"""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.profile.test_predict import predicted, wish
from tuner.model import tiles
from tuner.model.quantize import linear
from tuner.model.quantize.codes import Kind, code_columns, code_type
from tuner.model.quantize.linear import fill
from tuner.profile import tracing
from tuner.profile.allocations import AllocationTracker
from tuner.profile.prediction import Prediction
from tuner.profile.tracing import cuda_stand_in, quiet_kernels

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
    monkeypatch.setattr(linear, "TILE_BYTES", {"cpu": 1 << 15, "cuda": 1 << 15})  # 64 rows or columns
    made: Counter[str] = Counter()
    monkeypatch.setattr(linear, "fill", lambda *given: made.update([given[0].device.type]) or fill(*given))
    recipe = wish(tmp_path, model=model, train={"precision": "bf16"}, **LORA)
    few, those = predicted(recipe, device), made.total()
    monkeypatch.setattr(tracing, "TILES", TILES)
    every = predicted(recipe, device)
    assert made.total() - those > those > 0
    assert few.memory == every.memory and few.time == every.time


ROWS, OUT, COLUMNS, ONE_TILE = 96, 640, 512, 1 << 18


def given(kind: Kind, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes, scales, input and upstream gradient."""
    codes = torch.zeros(OUT, code_columns(kind, COLUMNS), dtype=code_type(kind))
    source = torch.zeros(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
    return codes, torch.zeros(OUT, COLUMNS // 64), source, torch.zeros(ROWS, OUT, dtype=dtype)


def step(tensors: tuple[torch.Tensor, ...], native: bool) -> None:
    codes, scales, source, upstream = tensors
    torch.autograd.grad(linear.quantized_linear(source, codes, scales, None, native), source, upstream)


def counted(kind: Kind, dtype: torch.dtype, native: bool) -> int:
    """Bytes that torch's allocator gave out at its fullest."""
    tensors = given(kind, dtype)
    step(tensors, native)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(tensors, native)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = sorted((event.start_ns(), int(event.nbytes())) for event in events)
    return max(accumulate(size for _, size in sizes))


def predicted_peak(kind: Kind, dtype: torch.dtype, native: bool, device: str = "cpu") -> int:
    with quiet_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        tensors, tracker = given(kind, dtype), AllocationTracker(device)
        with tracker:
            step(tensors, native)
    came = [change for change in tracker.changes if tracker.storages[change.storage].part != "batch"]
    return max(accumulate(change.delta for change in came))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("native", [False, True])
def test_the_peak_on_a_cpu(kind: Kind, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear.TILE_BYTES, "cpu", ONE_TILE)
    assert predicted_peak(kind, dtype, native) == pytest.approx(counted(kind, dtype, native), rel=0.01)


def test_the_peak_on_a_gpu_is_one_tile_besides_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear.TILE_BYTES, "cuda", ONE_TILE)
    largest = linear.tiles(COLUMNS, 2 * OUT, "cuda")[0][1] * OUT
    with cuda_stand_in():
        assert predicted_peak("nf4", torch.bfloat16, False, "cuda") == 2 * (largest + ROWS * COLUMNS + ROWS * OUT)
