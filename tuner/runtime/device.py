"""Facts about the device that a run will use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuner.errors import MachineError
from tuner.runtime.process import cores


@dataclass(frozen=True)
class DeviceFacts:
    """One device: memory in bytes; `bf16_fast` when its arithmetic units take bf16; `threads` of this process."""

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: int
    free_bytes: int
    bf16_fast: bool
    threads: int


def device_facts(kind: Literal["auto", "cuda", "cpu"], index: int = 0) -> DeviceFacts:
    """The facts of CUDA device `index` or of the CPU; `auto` takes CUDA when there is one.

    Raises MachineError when `cuda` is asked for and missing.
    """
    import torch

    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise MachineError("train.device is cuda, but torch finds no CUDA device", hint="use --train.device cpu")
    if kind == "cpu" or not available:
        total, free = host_memory()
        name, flags = _processor()
        return DeviceFacts("cpu", name, total, free, bool(flags & _BF16_FLAGS), torch.get_num_threads())
    if index >= torch.cuda.device_count():
        raise MachineError(f"local rank {index} has no CUDA device: there are {torch.cuda.device_count()}")
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts("cuda", properties.name, total, free, properties.major >= 8, torch.get_num_threads())


_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def _processor() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"cpu, {cores()} cores", frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return name[1].strip() if name else f"cpu, {cores()} cores", frozenset(flags[1].split() if flags else ())


def host_memory() -> tuple[int, int]:
    """Total and available bytes of the machine, bounded by the control group's limit."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        facts = {key: int(value) * 1024 for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, flags=re.MULTILINE)}
        total, free = facts["MemTotal"], facts["MemAvailable"]
    except (OSError, KeyError, ValueError):
        import os

        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return total, free
    return min(total, limit), max(0, min(free, limit - used))
