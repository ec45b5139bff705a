"""Products with quantised weights are predicted to hold what they hold: a tile, and what torch makes a tile of."""

from itertools import accumulate

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tuner.model.quantize import product
from tuner.model.quantize.codes import Kind, code_columns, code_type
from tuner.model.quantize.product import quantized_linear, tiles
from tuner.profile.allocations import AllocationTracker
from tuner.profile.tracing import cuda_stand_in, quiet_kernels

ROWS, OUT, COLUMNS, TILE = 96, 640, 512, 1 << 18


def given(kind: Kind, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Codes, scales, input and upstream gradient."""
    codes = torch.zeros(OUT, code_columns(kind, COLUMNS), dtype=code_type(kind))
    source = torch.zeros(ROWS, COLUMNS, dtype=dtype, requires_grad=True)
    return codes, torch.zeros(OUT, COLUMNS // 64), source, torch.zeros(ROWS, OUT, dtype=dtype)


def step(tensors: tuple[torch.Tensor, ...], native: bool) -> None:
    codes, scales, source, upstream = tensors
    torch.autograd.grad(quantized_linear(source, codes, scales, None, native), source, upstream)


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


def predicted(kind: Kind, dtype: torch.dtype, native: bool, device: str = "cpu") -> int:
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
    monkeypatch.setitem(product.TILE_BYTES, "cpu", TILE)
    assert predicted(kind, dtype, native) == pytest.approx(counted(kind, dtype, native), rel=0.01)


def test_the_peak_on_a_gpu_is_one_tile_besides_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(product.TILE_BYTES, "cuda", TILE)
    largest = tiles(COLUMNS, 2 * OUT, "cuda")[0][1] * OUT
    with cuda_stand_in():
        assert predicted("nf4", torch.bfloat16, False, "cuda") == 2 * (largest + ROWS * COLUMNS + ROWS * OUT)
