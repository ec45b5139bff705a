"""Freed memory stays with the process, so that the next step meets no page fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tuner.runtime.memory import keep_freed_memory

PROGRAM = """
import ctypes, resource
from tuner.runtime.memory import keep_freed_memory
{keep}
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(48 << 20)
    ctypes.memset(block, 1, 48 << 20)
    library.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
use()
print(use())
"""


def faults(keep: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_block_used_again_costs_no_fault() -> None:
    assert faults("assert keep_freed_memory(1 << 30)") < 10 < faults("")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_what_cannot_be_reserved_is_left() -> None:
    assert faults("assert keep_freed_memory(1 << 60)") < 10


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory(1 << 20) is False
