"""C sources become a library once for each processor, in a directory that nobody else may write to."""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuner.errors import MachineError
from tuner.model.native.library import compiled


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
