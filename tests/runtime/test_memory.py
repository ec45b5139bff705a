
import gc
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import fork, wait
from tuner.runtime import memory


@pytest.mark.parametrize("size", [1 << 12, 64 << 20])
def test_growth_is_seen(size: int) -> None:
    """In one of three tries: other threads, and the collector, let go of some bytes whenever they please."""
    if memory.allocated_bytes() is None:
        pytest.skip("the C library does not say")
    grown = []
    for _ in range(3):
        gc.collect()
        before = memory.allocated_bytes() or 0
        blocks = [bytearray(size) for _ in range((64 << 20) // size)]
        grown.append((memory.allocated_bytes() or 0) - before)
        del blocks
        memory.give_back()
        assert abs((memory.allocated_bytes() or 0) - before) < 8 << 20
    assert any(64 << 20 <= bytes_ < 72 << 20 for bytes_ in grown), grown


def test_the_resident_size_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("900 7 3 1 0 1 0\n")
    monkeypatch.setattr(memory, "_STATM", tmp_path / "statm")
    monkeypatch.setattr(sys, "platform", "linux")
    assert memory.resident_bytes() == 7 * 4096
    monkeypatch.setattr(memory, "_STATM", tmp_path / "none")
    assert memory.resident_bytes() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.resident_bytes() is None


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """A C library without mallinfo2 and malloc_trim."""

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library())
    assert memory.allocated_bytes() is None
    memory.give_back()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.allocated_bytes() is None
    memory.give_back()


def test_the_collector_is_calm_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gc", gc)  # that freezes

    def calm() -> None:
        gc.unfreeze()
        before = gc.get_threshold()
        with memory.calm_collector():
            assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
        assert gc.get_threshold() == before and gc.get_freeze_count() == 0

    assert wait(fork(calm)) == 0
