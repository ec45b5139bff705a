"""What of a machine is tried with torch: the device, what products it computes, cores, compilers and kernels.

Trainings on CUDA need more besides a device: kernels, page-locked memory, the allocator, a device each.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

from tuner.errors import MachineError, counted, first_line
from tuner.model.fastest import FLASH_4, USUAL_FLASH, WAY_TO_FLASH_4, Heads, versions_for
from tuner.model.flash4_attention import problem
from tuner.model.kernels import has_liger
from tuner.model.native.library import c_compiler, native_problem
from tuner.runtime import device
from tuner.runtime.before_torch import ALLOCATOR, SEGMENTS, is_wsl
from tuner.runtime.device import device_facts, forget_cuda_error, generation, triton_problem
from tuner.runtime.dist import RankInfo, cores
from tuner.runtime.files import scratch_dir
from tuner.setup.machine_check import Check, Status, gib


def _device() -> Iterator[Check]:
    facts = device_facts("auto")
    if facts.kind == "cpu":
        driver = Path("/proc/driver/nvidia/version")
        if driver.is_file():
            build = "a CPU build" if torch.version.cuda is None else f"a build for CUDA {torch.version.cuda}"
            yield Check(
                "device", "warning", f"{facts.name}; an NVIDIA driver is here, but torch finds no CUDA device",
                f"torch is {build}: training takes the CPU", "install the torch build for this driver: pytorch.org",
            )  # fmt: skip
        else:
            speed = "has bf16 instructions" if facts.bf16_fast else "has no bf16 instructions: computes in fp32"
            yield Check("device", "ok", f"CPU, {facts.name}", f"no GPU: small models and tests; it {speed}")
    else:
        for index in range(torch.cuda.device_count()):
            one = device_facts("cuda", index)
            capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
            room = f"{gib(one.total_bytes)}, {gib(one.free_bytes)} free"
            status: Status = "ok" if one.bf16_fast else "warning"
            found = f"cuda:{index} {one.name}, {room}, capability {capability}, {_computes(one)}"
            yield Check("device", status, found, "" if one.bf16_fast else _WITHOUT_BF16[one.generation >= device.VOLTA])
        yield Check("driver", "ok", f"CUDA {torch.version.cuda} of torch, driver {_driver()}")
    yield _product(facts.kind)


_WITHOUT_BF16 = {
    True: "no bf16 units: computes in fp16, and the loss is scaled",
    False: "neither bf16 nor fp16 units: computes in fp32, which is slow",
}
"""What the lack of bf16 means, by whether there are units for fp16."""


def _computes(facts: device.DeviceFacts) -> str:
    """What a GPU has units for, by the names of `train.precision`."""
    there = {"bf16": facts.bf16_fast, "fp16": facts.generation >= device.VOLTA, "fp8": facts.has_fp8}
    return "fp32" + "".join(f", {name}" for name, is_there in there.items() if is_there)


def _product(kind: str) -> Check:
    """A product of matrices on the device, against one that is known."""
    started = time.perf_counter()
    ones = torch.ones(64, 512, device=kind, dtype=torch.bfloat16)
    result = ones @ ones.T
    right = bool((result.float() == 512).all())
    seconds = time.perf_counter() - started
    if not right:
        return Check("product", "broken", f"a bf16 product on the {kind} is wrong", "nothing can be trained on it")
    return Check("product", "ok", f"a bf16 product on the {kind} is right ({seconds:.2f} s with its start)")


def _driver() -> str:
    if (program := shutil.which("nvidia-smi")) is None:
        return "unknown: no nvidia-smi"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n", maxsplit=1)[0].strip() or "unknown"


def _processor() -> Iterator[Check]:
    here, may = os.cpu_count() or 1, cores()
    quota = _quota()
    found = f"{may} of {here} cores may be used, {counted(torch.get_num_threads(), 'thread')}"
    if quota is not None and quota < may:
        means = f"the control group allows {quota:g} cores' time: more threads than that wait for each other"
        yield Check("processor", "warning", found, means, f"export OMP_NUM_THREADS={max(1, int(quota))}")
    elif may < here:
        yield Check("processor", "ok", found, "the affinity of this process leaves the others out (taskset, SLURM)")
    else:
        yield Check("processor", "ok", found)


def _quota() -> float | None:
    """Cores' time that the control group allows; None without a limit."""
    with suppress(OSError, ValueError):  # "max" is no number
        limit, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split())
        return limit / period
    return None


def _compilers() -> Iterator[Check]:
    means = "kernels in C are not built: training on a CPU is slower"
    if (compiler := c_compiler()) is None:
        yield Check("C compiler", "missing", "none of cc, gcc, clang", means, "apt install gcc")
    else:
        with scratch_dir("tuner-doctor-") as work:
            source = work / "one.c"
            source.write_text("int one(void) { return 1; }\n", encoding="ascii")
            command = [compiler, "-shared", "-fPIC", str(source), "-o", str(source.with_suffix(".so"))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            yield Check("C compiler", "ok", f"{compiler} compiles")
        else:
            said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
            yield Check("C compiler", "warning", f"{compiler} fails: {said}", means, "apt install gcc libc6-dev")
    if (problem := device.compiler_problem("cuda" if torch.cuda.is_available() else "cpu")) is None:
        yield Check("torch.compile", "ok", "a C++ compiler and Python's headers are here")
    else:
        means = "train.compile: true fails, auto trains uncompiled"
        yield Check("torch.compile", "missing", problem, means, device.TO_COMPILE)


def _kernels() -> Iterator[Check]:
    if torch.cuda.is_available():
        yield from examine_cuda()
    elif (problem := native_problem()) is None:
        yield Check("kernels", "ok", "native: those in C are built and loaded")
    else:
        yield Check("kernels", "missing", problem, "model.kernels: auto takes torch's, which is slower on a CPU")


TRIED: dict[str, Callable[[], Iterator[Check]]] = {
    "device": _device, "processor": _processor, "compilers": _compilers, "kernels": _kernels,
}  # fmt: skip


LOCKED = 1 << 30
"""Bytes that are page-locked for a moment: what copies of a small model's state take."""
LESS = "model.kernels: auto takes torch's, with more memory at the output layer"


def examine_cuda() -> Iterator[Check]:
    """Try it all, where there is a CUDA device."""
    yield _liger()
    yield _attention()
    yield _page_lock()
    yield _allocator()
    if torch.cuda.device_count() > 1:
        yield _links(torch.cuda.device_count())
    if RankInfo.is_given():
        yield _own_device()


def _liger() -> Check:
    if not has_liger("llama"):
        return Check("kernels", "missing", "liger-kernel is not installed", LESS, "pip install liger-kernel")
    if (problem := triton_problem()) is not None:
        return Check("kernels", "missing", f"liger's cannot be compiled: {problem}", LESS, device.TO_COMPILE)
    from liger_kernel.transformers import LigerRMSNorm

    try:
        norm = LigerRMSNorm(64).to("cuda")
        right = bool(torch.isfinite(norm(torch.ones(4, 64, device="cuda"))).all())
    except Exception as error:  # noqa: BLE001 - of a compiler, of Triton or of the driver
        return Check("kernels", "warning", f"liger fails on the GPU: {first_line(error)}", LESS, device.TO_COMPILE)
    if not right:
        return Check("kernels", "broken", "liger gives numbers that are not finite on the GPU")
    return Check("kernels", "ok", "liger computes on the GPU")


def _attention() -> Check:
    """Which flash attention there is for this device; whether it is right is tried on each model's own heads."""
    major = generation(torch.cuda.current_device())
    usual = [Heads(32, 8, 128, 128, 0.0, 0.0)]  # of most models with 7 billion parameters and more
    if there := versions_for(usual, major):
        return Check("attention", "ok", f"{there[0].name}: {there[0].package} is installed")
    if problem(major, 128, 128, is_grouped=True, is_capped=False) is not None:
        return Check("attention", "ok", f"{USUAL_FLASH}: there is no later one for compute capability {major}.x")
    means = f"attention takes longer than by {FLASH_4.name}, which is for this device"
    return Check("attention", "missing", f"{USUAL_FLASH}, which torch brings", means, WAY_TO_FLASH_4)


def _page_lock() -> Check:
    block = torch.empty(LOCKED, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    if (code := int(cudart.cudaHostRegister(block.data_ptr(), LOCKED, 0))) == 0:
        cudart.cudaHostUnregister(block.data_ptr())
        return Check("page-lock", "ok", f"{LOCKED >> 20:,} MiB of host memory can be page-locked")
    forget_cuda_error(torch.device("cuda", torch.cuda.current_device()))
    return Check(
        "page-lock", "warning", f"{LOCKED >> 20:,} MiB of host memory cannot be page-locked (CUDA error {code})",
        "saves in the background copy through plain memory, and training waits a little longer for them",
        "WSL allows little of it" if is_wsl() else "raise the limit: ulimit -l unlimited, or the container's",
    )


def _allocator() -> Check:
    if (said := os.environ.get(ALLOCATOR) or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")) is not None:
        return Check("allocator", "ok", said, "" if said == SEGMENTS else "as the environment says")
    means = "memory of the device is kept in blocks of fixed size: tensors of several sizes leave holes in it"
    where = "WSL's driver has no expandable segments" if is_wsl() else "no expandable segments"
    return Check("allocator", "warning" if is_wsl() else "missing", where, means, f"export {ALLOCATOR}={SEGMENTS}")


def _links(count: int) -> Check:
    """Whether the GPUs of this machine reach each other, as groups that compute layers and rows together want it."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    sizes = ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)
    groups = f"groups of {sizes} are possible"
    if not apart:
        return Check("links", "ok", f"{count} GPUs, each reaches the others' memory: {groups}")
    one, other = apart[0]
    return Check(
        "links", "warning", f"{count} GPUs, of which {one} does not reach the memory of {other}: {groups}",
        "what parallel.tensor, sequence and expert exchange goes through the host's memory, and is waited for",
        "parallel.shard alone sends while it computes",
    )


def _own_device() -> Check:
    """Whether each of a launcher's processes on this machine has a device of its own."""
    try:
        tasks = RankInfo.from_environment().local_world_size
    except MachineError as error:
        return Check("launcher", "broken", error.message, "processes of a run do not find each other", error.hint or "")
    visible = torch.cuda.device_count()
    found = f"{tasks} process{'es' if tasks > 1 else ''} on this machine, each sees {visible} GPU{'s' * (visible > 1)}"
    if visible >= tasks:
        return Check("launcher", "ok", found)
    if visible == 1:
        return Check("launcher", "ok", found, "taken for one of its own, as SLURM binds them; a run checks that")
    return Check("launcher", "broken", found, "some would have none", "start as many processes as there are GPUs")
