from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner.runtime import memory


def test_growth_is_seen() -> None:
    memory.give_back()  # what earlier tests freed
    before = memory.resident_bytes()
    if before is None:
        assert sys.platform != "linux"
        return
    block = bytearray(b"x") * (64 << 20)
    after = memory.resident_bytes()
    assert after is not None and after - before > 48 << 20
    del block
    memory.give_back()
    assert (memory.resident_bytes() or 0) - before < 48 << 20


def test_a_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATM", Path("/no/such/file"))
    assert memory.resident_bytes() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.resident_bytes() is None
    memory.give_back()


def test_the_collector_is_calm_for_a_while() -> None:
    import gc

    before = gc.get_threshold()
    with memory.calm_collector():
        assert gc.get_threshold()[0] > before[0] and gc.get_freeze_count() > 0
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
