from __future__ import annotations

import sys

import pytest

from tuner.runtime import memory


@pytest.mark.parametrize("size", [1 << 12, 64 << 20])
def test_growth_is_seen(size: int) -> None:
    before = memory.allocated_bytes()
    if before is None:
        pytest.skip("the C library does not say")
    blocks = [bytearray(size) for _ in range((64 << 20) // size)]
    after = memory.allocated_bytes()
    assert after is not None and 64 << 20 <= after - before < 72 << 20
    del blocks
    memory.give_back()
    assert abs((memory.allocated_bytes() or 0) - before) < 8 << 20


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """A C library without mallinfo2 and malloc_trim."""

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Library())
    assert memory.allocated_bytes() is None
    memory.give_back()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.allocated_bytes() is None
    memory.give_back()


def test_the_collector_is_calm_for_a_while() -> None:
    import gc

    before = gc.get_threshold()
    with memory.calm_collector():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
