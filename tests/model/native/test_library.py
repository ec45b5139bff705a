"""C sources become a library once for each processor, in a directory that nobody else may write to; without an
instruction for bfloat16 the kernels give the same, to the rounding.
"""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tuner.errors import MachineError
from tuner.model.native import attention, layers
from tuner.model.native import library as module
from tuner.model.native.attention import native_attention
from tuner.model.native.library import compiled, library


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "number.h").write_text("#define NUMBER 41\n")
    (tmp_path / "number.c").write_text('#include "number.h"\nint number(void) { return NUMBER + 1; }\n')
    return [tmp_path / "number.c", tmp_path / "number.h"]


def test_compiled_once_and_again_after_a_change(sources: list[Path]) -> None:
    first = compiled(sources[:1], sources[1:])
    assert ctypes.CDLL(str(first)).number() == 42
    before = first.stat().st_mtime_ns
    assert compiled(sources[:1], sources[1:]) == first and first.stat().st_mtime_ns == before
    sources[1].write_text("#define NUMBER 1\n")
    second = compiled(sources[:1], sources[1:])
    assert second != first and ctypes.CDLL(str(second)).number() == 2
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, second.name])


def test_several_at_one_time(sources: list[Path]) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: compiled(sources[:1], sources[1:]), range(3)))
    assert len(set(found)) == 1 and ctypes.CDLL(str(found[0])).number() == 42
    assert list(found[0].parent.iterdir()) == [found[0]]


def test_no_compiler(sources: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(MachineError, match="no C compiler"):
        compiled(sources[:1], sources[1:])


def test_a_broken_source_is_quoted_and_leaves_nothing(sources: list[Path], tmp_path: Path) -> None:
    sources[0].write_text("int number(void) { return nothing; }\n")
    with pytest.raises(MachineError, match="'nothing' undeclared|undeclared identifier 'nothing'"):
        compiled(sources[:1], sources[1:])
    assert not list((tmp_path / "cache" / "tuner" / "kernels").iterdir())


def test_a_directory_that_others_may_write_to_is_refused(sources: list[Path], tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / "tuner" / "kernels"
    kernels.mkdir(parents=True)
    kernels.chmod(0o777)
    with pytest.raises(MachineError, match="others may write to it"):
        compiled(sources[:1], sources[1:])
    assert not os.listdir(kernels)


PLAIN = "-mno-avx512bf16"
BOUNDS = torch.tensor([0, 3, 70, 201], dtype=torch.int32)


@pytest.fixture
def plain_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels are compiled anew, for this processor as it would be without that instruction."""
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("this processor has no such instruction: all tests are of the other way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "FLAGS", (*module.FLAGS, PLAIN))
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
        patch.setattr(module, "FLAGS", tuple(flag for flag in module.FLAGS if flag != PLAIN))
        library.cache_clear()
        own = results()
        assert Path(library()._name) != path
    for one, other in zip(plain, own, strict=True):
        apart = (one.double() - other.double()).norm() / other.double().norm()
        assert apart < 4e-3 and one.dtype == other.dtype
