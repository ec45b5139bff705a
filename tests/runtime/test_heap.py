"""What the process holds of the machine's memory, and what becomes of what it frees."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import fork, wait
from tuner.runtime import memory
from tuner.runtime.memory import FreedMemory, keep_freed_memory, return_freed_memory


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


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
PROGRAM = """
import ctypes, resource
from tuner.runtime.memory import FreedMemory, keep_freed_memory, return_freed_memory
from tuner.runtime.memory import resident_bytes
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(48 << 20)
    ctypes.memset(block, 1, 48 << 20)
    library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
{code}
"""
FAULTS = "use()\nprint(use())"
HOLES = """
before = resident_bytes()
blocks = [library.malloc(2 << 20) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, 2 << 20)
for block in blocks[::2]:
    library.free(block)
print((resident_bytes() - before) >> 20)
"""


def said(code: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(code=code)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@on_linux
def test_a_block_used_again_costs_no_fault() -> None:
    assert said(f"assert keep_freed_memory(1 << 30)\n{FAULTS}") < 10 < said(FAULTS)


@on_linux
def test_what_cannot_be_reserved_is_left() -> None:
    assert said(f"assert keep_freed_memory(1 << 60)\n{FAULTS}") < 10


@on_linux
def test_what_is_returned_leaves_no_holes() -> None:
    assert said(f"keep_freed_memory(1 << 20)\n{HOLES}") > 190
    assert said(f"assert return_freed_memory()\n{HOLES}") < 110


@on_linux
def test_what_was_kept_is_returned_too() -> None:
    both = f"keep_freed_memory(1 << 30)\nuse()\nassert return_freed_memory()\n{FAULTS}"
    assert said(both) > 10
    assert said("keep_freed_memory(1 << 30)\nuse()\nreturn_freed_memory()\nprint(resident_bytes() >> 20)") < 45


@on_linux
def test_what_the_process_may_take_is_part_of_the_room() -> None:
    limited = "resource.setrlimit(resource.RLIMIT_DATA, ({}, -1))\nfreed = FreedMemory(1 << 40)\nfreed.after_step()\n"
    assert said(f"{limited.format('1 << 34')}print(int(freed.kept))") == 1
    assert said(f"{limited.format('resident_bytes()')}print(int(freed.kept))") == 0


@on_linux
def test_what_building_took_is_no_measure_of_a_step() -> None:
    before = bytearray(b"1") * (400 << 20)  # of the process that starts the others, and no part of theirs
    built = "block = library.malloc(300 << 20)\nctypes.memset(block, 1, 300 << 20)\nlibrary.free(block)\n"
    steps = "freed = FreedMemory(200 << 20)\nfreed.before_first_step()\n{}freed.after_step()\nprint(int(freed.kept))"
    assert said(built + steps.format("")) == 1
    assert said(steps.format(built)) == 0
    peaks = "print(int(peak_resident_bytes() > 300 << 20 > _counted_peak()))"
    imported = "from tuner.runtime.memory import _counted_peak, peak_resident_bytes\n"
    assert said(imported + built + steps.format("").replace("print(int(freed.kept))", peaks)) == 1
    assert len(before) == 400 << 20


class Steps:
    """Steps whose peaks are given, and what was asked of the library after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_glibc: bool = True) -> None:
        self.asked = list[str]()
        self.peak = 0
        monkeypatch.setattr(memory, "keep_freed_memory", lambda size: self.ask(f"keep {size}") and has_glibc)
        monkeypatch.setattr(memory, "return_freed_memory", lambda: self.ask("return") and has_glibc)
        monkeypatch.setattr(memory, "_counted_peak", lambda: self.peak)
        self.freed = FreedMemory(1000)
        self.freed.before_first_step()
        assert self.asked.pop() == "return"

    def ask(self, what: str) -> bool:
        self.asked.append(what)
        return True

    def take(self, *peaks: int) -> list[str]:
        for peak in peaks:
            self.peak = peak
            self.freed.after_step()
        return self.asked


def test_where_there_is_room_for_holes_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch).take(888, 900, 970) == ["keep 500"]


def test_where_there_is_none_it_is_returned_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch).take(889, 900, 990) == []


def test_where_a_longer_row_comes_it_is_returned_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch).take(700, 900, 990, 600, 700) == ["keep 500", "return"]


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch, has_glibc=False).take(700, 700, 900) == []


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory(1 << 20) is False
    assert return_freed_memory() is False
