"""What benchmarks measure alike: ways in turns, the memory of this process, and the machine that figures are of."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def alternated(
    ways: Mapping[str, Callable[[], T]], rounds: int, told: Callable[[int, str, T], object] = lambda *_: None
) -> dict[str, list[T]]:
    """What each way gave in each round; ways take turns, so that what the machine does meanwhile strikes all alike."""
    taken: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            taken[name].append(way())
            told(number, name, taken[name][-1])
    return taken


def memory(field: str) -> int:
    """`VmRSS`, `VmHWM` or `RssAnon` of this process in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def machine(device: str) -> dict[str, Any]:
    """What the figures were made on."""
    python = {"python": sys.version.split()[0]}
    if device == "cuda":
        import torch

        return {"device": torch.cuda.get_device_name(), **python}
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return {"cpu": model, "cores": os.cpu_count(), "threads": threads, "avx512_bf16": "avx512_bf16" in text, **python}
