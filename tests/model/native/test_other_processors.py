"""On a processor without an instruction for bfloat16 the kernels give the same, to the rounding."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tuner.model.native import attention, layers
from tuner.model.native import library as compiled
from tuner.model.native.attention import native_attention
from tuner.model.native.library import library

PLAIN = "-mno-avx512bf16"
BOUNDS = torch.tensor([0, 3, 70, 201], dtype=torch.int32)


@pytest.fixture
def plain_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels are compiled anew, for this processor as it would be without that instruction."""
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no such instruction: all tests are of the other way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, PLAIN))
    yield
    library.cache_clear()


def results() -> list[torch.Tensor]:
    """Of every kernel that rounds to bfloat16 or multiplies what is: values and gradients."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    query, key, value = numbers(4, 201, 33), numbers(2, 201, 33), numbers(2, 201, 24)
    mixed, normaliser = native_attention(query, key, value, BOUNDS, 50, 0.2)
    upstream = numbers(201, 4, 24)
    grads = attention._backward(upstream, query, key, value, mixed, normaliser, BOUNDS, 50, 0.2)
    gate, up, rows, weight = numbers(999), numbers(999), numbers(5, 33), numbers(33)
    gates = layers._gate_backward(numbers(999), gate, up)
    return [
        mixed, normaliser, *grads, layers.native_swiglu(gate, up), *gates, *layers.native_rms_norm(rows, weight, 1e-6)
    ]  # fmt: skip


@pytest.mark.slow
def test_they_differ_by_rounding_alone(plain_processor: None) -> None:
    library.cache_clear()
    plain, path = results(), Path(library()._name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FLAGS", tuple(flag for flag in compiled.FLAGS if flag != PLAIN))
        library.cache_clear()
        own = results()
        assert Path(library()._name) != path
    for one, other in zip(plain, own, strict=True):
        apart = (one.double() - other.double()).norm() / other.double().norm()
        assert apart < 4e-3 and one.dtype == other.dtype
