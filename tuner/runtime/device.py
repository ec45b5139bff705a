"""The device that a run will use: facts about it, what it can do at most, its timeline, and whose kernels compute."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tuner.errors import MachineError, counted
from tuner.runtime.dist import cores
from tuner.runtime.memory import host_memory

ROUNDS, MOST_ROUNDS, MEASURED_S = 4, 40, 0.25
"""Products that are timed at least and at most, and the seconds after which no further one is begun."""
SLOW_SIDE = 256
"""That of matrices in types that a CPU has no instructions for, which torch multiplies a hundred times more slowly."""
TO_COMPILE = "apt install g++ python3-dev; pip install triton"
"""What brings whatever :func:`compiler_problem` or :func:`triton_problem` finds missing."""
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""By which a user bounds the instructions that oneDNN, whose kernels multiply matrices on a CPU, may use."""
_ISAS_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Its names of instruction sets that do not multiply bf16."""
_traced: str | None = None
"""Process-wide, and no context variable: compiled layers read it."""
_traced_memory: int | None = None
_traced_generation = 0
VOLTA, AMPERE, HOPPER = 7, 8, 9
"""Generations of CUDA devices: the first one's arithmetic units take fp16, the second's bf16 too."""
ADA = (8, 9)
"""The first compute capability whose arithmetic units take fp8."""


@dataclass(frozen=True)
class DeviceFacts:
    """One device: memory in bytes; `bf16_fast` when its arithmetic units take bf16; `threads` of this process."""

    kind: Literal["cuda", "cpu"]
    name: str
    total_bytes: int
    free_bytes: int
    bf16_fast: bool
    threads: int
    generation: int = 0
    """The first number of CUDA's compute capability, such as 8 for Ampere and Ada, 9 for Hopper; 0 on a CPU."""
    has_fp8: bool = False
    """Whether its arithmetic units take fp8."""


def device_facts(kind: Literal["auto", "cuda", "cpu"], index: int = 0) -> DeviceFacts:
    """The facts of CUDA device `index` or of the CPU; `auto` takes CUDA when there is one.

    Raises MachineError when `cuda` is asked for and missing.
    """
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise MachineError("train.device is cuda, but torch finds no CUDA device", hint="use --train.device cpu")
    if kind == "cpu" or not available:
        total, free = host_memory()
        name, flags = _processor()
        return DeviceFacts("cpu", name, total, free, _multiplies_bf16(flags), torch.get_num_threads())
    if index >= torch.cuda.device_count():
        raise MachineError(
            f"local rank {index} has no CUDA device: there are {torch.cuda.device_count()}",
            hint="start as many processes as there are GPUs (parallel.processes, or the launcher's number)",
        )
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    major, threads = properties.major, torch.get_num_threads()
    has_fp8 = (major, properties.minor) >= ADA
    return DeviceFacts("cuda", properties.name, total, free, major >= AMPERE, threads, major, has_fp8)


def _processor() -> tuple[str, frozenset[str]]:
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    name = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return name[1].strip() if name else f"cpu, {counted(cores(), 'core')}", frozenset(flags[1].split() if flags else ())


def _multiplies_bf16(flags: frozenset[str]) -> bool:
    """Whether matrices of bf16 are multiplied by instructions of a processor with these flags, not in float32."""
    bound = next((os.environ[name] for name in _ISA_VARIABLES if name in os.environ), "")
    return bool(flags & _BF16_FLAGS) and bound.upper() not in _ISAS_WITHOUT_BF16


def room_on(device: torch.device, processes: int) -> int:
    """Bytes that this process can still take: on CUDA with what its allocator keeps; else its share of the host's."""
    if device.type != "cuda":
        return host_memory()[1] // processes
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@cache
def measured_peak(kind: Literal["cuda", "cpu"], precision: str, index: int) -> float:
    """Operations per second in one large product of random matrices in a precision: the best of some, once a process.

    Of fp32 ones as they are multiplied now; ``tf32`` says that this is as TF32. With fp8, of which no rate of products
    says what a step could reach, that of bf16.
    A product takes a few milliseconds, so that among so many one is undisturbed where other programs share the cores.
    Draws from a generator of its own, so that no other random number changes; on CUDA it returns its memory.
    """
    device = torch.device(kind, index) if kind == "cuda" else torch.device("cpu")
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    is_slow = kind == "cpu" and not _multiplies(dtype)
    side = SLOW_SIDE if is_slow else side_of(kind, torch.get_num_threads())
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    result = torch.empty(side, side, device=device, dtype=dtype)
    best, rounds, began = float("inf"), 0, time.perf_counter()
    while rounds <= ROUNDS or (rounds <= MOST_ROUNDS and time.perf_counter() - began < MEASURED_S):
        rounds, started = rounds + 1, time.perf_counter()
        torch.mm(left, right, out=result)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    if kind == "cuda":
        del left, right, result
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * side**3 / best


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products in a type; for fp16 torch calls none of any."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and _multiplies_bf16(_processor()[1]))


def side_of(kind: Literal["cuda", "cpu"], threads: int) -> int:
    """Rows and columns of the matrices: so large that nothing but the product counts, and no larger."""
    if kind == "cuda":
        return 8192
    return 1024 if threads <= 4 else 2048 if threads <= 32 else 4096


def compiler_problem(device: str) -> str | None:
    """What torch.compile lacks on this machine for a kind of device, ``cpu`` or ``cuda``; None where nothing."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler})"
    return triton_problem() if device == "cuda" else _headers_problem()


def triton_problem() -> str | None:
    """What kernels in Triton, such as liger's, lack on this machine; None where nothing.

    Before its first kernel Triton compiles the stub through which it calls the driver, in C and with Python's headers:
    with ``CC``, else with the first of gcc and clang that is there (``triton/runtime/build.py``).
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    chosen = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if chosen is None else (chosen,))):
        return f"there is no C compiler ({'gcc, clang' if chosen is None else chosen})"
    return _headers_problem()


def _headers_problem() -> str | None:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme puts them where its Python does not have them; both compilers' users know it.
    include = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    return None if Path(include, "Python.h").is_file() else "Python's headers are not installed (Python.h)"


def forget_cuda_error(device: torch.device) -> None:
    """Take back what a refused call left: CUDA keeps it, and the thread's next kernel would report it.

    Torch has no function that asks for it, but every launch does, and clears it: this one is made for that.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)


def to_device(array: object, device: torch.device) -> torch.Tensor:
    """A host array as a tensor on the device; nothing waits for the copy."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class DeviceMark:
    """When a device has done what was queued before: of a CUDA device an event, of a CPU now."""

    def __init__(self, is_asynchronous: bool) -> None:
        self._at, self._event = time.monotonic(), torch.cuda.Event(enable_timing=True) if is_asynchronous else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once the device has got there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceMark) -> float:
        """Seconds between two moments of one timeline, both of which the device has reached."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Timeline:
    """The time of one device, and of the host next to it; a CPU's is the host's own."""

    def __init__(self, device: torch.device) -> None:
        self.is_asynchronous = device.type == "cuda"
        """Whether the host runs ahead of the device, so that reading what it computes may wait."""

    def now(self) -> float:
        """The host's time, in seconds of a monotonic clock."""
        return time.monotonic()

    def mark(self) -> DeviceMark:
        """The moment at which the device will have done all that is queued by now. Nothing waits."""
        return DeviceMark(self.is_asynchronous)


timeline_of = Timeline


def target(tensor: torch.Tensor) -> str:
    """``cpu`` or ``cuda``: whose kernels an operation on this tensor takes."""
    return _traced or tensor.device.type


def generation(index: int | None) -> int:
    """The first number of the compute capability of CUDA device ``index``, or of the one that is traced for."""
    if _traced:
        return _traced_generation
    return torch.cuda.get_device_capability(index)[0] if torch.cuda.is_available() else 0


def is_traced() -> bool:
    """Whether tensors stand for ones on a device that need not be here."""
    return _traced is not None


def gpu_memory(tensor: torch.Tensor) -> int | None:
    """Bytes of memory, free or not, of the GPU that operations on this tensor run on; None where it is not known.

    That is on a CPU, and where a GPU is traced for whose memory nobody told.
    """
    if _traced is not None:
        return _traced_memory
    return int(torch.cuda.get_device_properties(tensor.device).total_memory) if tensor.is_cuda else None


@contextmanager
def traced_for(kind: str, memory_bytes: int | None = None, *, generation: int = HOPPER) -> Iterator[None]:
    """Within, every tensor counts as one on this kind and generation of device, which need not be here.

    For fake tensors, and for tests whose kernels are stand-ins. Where something chooses sizes by a GPU's memory it
    takes ``memory_bytes``.
    """
    global _traced, _traced_memory, _traced_generation  # noqa: PLW0603
    before = _traced, _traced_memory, _traced_generation
    _traced, _traced_memory, _traced_generation = kind, memory_bytes, generation
    try:
        yield
    finally:
        _traced, _traced_memory, _traced_generation = before
