"""What a part of the day is given, and how it says what it found: lines of JSON, a check or a figure each."""

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Day:
    """One part's machine and files."""

    part: str
    device: Literal["cuda", "cpu"]
    small: bool
    """Tiny shapes: whether everything runs, in seconds, on any machine."""
    work: Path
    """Where models, rows and runs are written; parts share it."""
    out: Path
    """Where what is brought home is written: `lines.jsonl` and a few files."""

    @property
    def on_gpu(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    def say(self, what: str, ok: bool | None = None, **figures: Any) -> None:
        """Write one line: ``ok`` judges a check, and is None for a figure."""
        line = {"part": self.part, "what": what, "ok": ok, **figures}
        with (self.out / "lines.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line, default=str) + "\n")
        print(json.dumps(line, default=str), flush=True)

    def check(self, what: str, work: Callable[[], dict[str, Any]]) -> None:
        """Say what `work` found: `ok`, true where it is left out, and figures. What it raises is a failure, said too.

        Nothing that fails stops what comes after it.
        """
        began = time.perf_counter()
        try:
            found = {"ok": True, **work()}
        except Exception as error:
            at = traceback.format_exc(limit=-4)[-1500:]
            found = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:600]}", "at": at}
        self.say(what, **found, seconds=round(time.perf_counter() - began, 2))

    def figure(self, what: str, work: Callable[[], dict[str, Any]]) -> None:
        """Say what `work` measured; memory that runs out is a figure too, any other error a failed check."""
        try:
            found = work()
        except torch.OutOfMemoryError as error:
            found = {"out of memory": str(error).partition(".")[0]}
        except Exception as error:
            self.say(what, ok=False, error=f"{type(error).__name__}: {str(error)[:600]}")
            return
        self.say(what, **found)

    def wait(self) -> None:
        """Let the device finish what is queued."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], times: int = 10, warm_up: int = 3) -> float:
        """Mean seconds of one call, the device's work included."""
        times, warm_up = (1, 1) if self.small else (times, warm_up)
        for _ in range(warm_up):
            work()
        self.wait()
        began = time.perf_counter()
        for _ in range(times):
            work()
        self.wait()
        return (time.perf_counter() - began) / times

    @contextlib.contextmanager
    def peak(self) -> Iterator[dict[str, float]]:
        """Within, the peak of allocated memory is recorded; the dictionary has `peak_gib` after it, on a GPU."""
        found: dict[str, float] = {}
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield found
        if self.on_gpu:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)

    def autocast(self) -> AbstractContextManager[object]:
        """As training computes in bf16: without copies of weights that outlive their use."""
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference of two tensors by the norm of the second."""
    a, b = found.detach().double(), wanted.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
