"""What of a machine is tried with torch: the device, what products it computes, cores, compilers and kernels."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tuner.errors import counted
from tuner.model.native.library import c_compiler, native_problem
from tuner.runtime.device import TO_COMPILE, VOLTA, DeviceFacts, compiler_problem, device_facts
from tuner.runtime.dist import cores
from tuner.runtime.files import scratch_dir
from tuner.setup.machine_check import Check, Status, gib
from tuner.setup.machine_cuda import examine_cuda


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
            yield Check("device", status, found, "" if one.bf16_fast else _WITHOUT_BF16[one.generation >= VOLTA])
        yield Check("driver", "ok", f"CUDA {torch.version.cuda} of torch, driver {_driver()}")
    yield _product(facts.kind)


_WITHOUT_BF16 = {
    True: "no bf16 units: computes in fp16, and the loss is scaled",
    False: "neither bf16 nor fp16 units: computes in fp32, which is slow",
}
"""What the lack of bf16 means, by whether there are units for fp16."""


def _computes(facts: DeviceFacts) -> str:
    """What a GPU has units for, by the names of `train.precision`."""
    there = {"bf16": facts.bf16_fast, "fp16": facts.generation >= VOLTA, "fp8": facts.has_fp8}
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
    program = shutil.which("nvidia-smi")
    if program is None:
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
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _compilers() -> Iterator[Check]:
    compiler = c_compiler()
    if compiler is None:
        means = "kernels in C are not built: training on a CPU is slower"
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
            means = "kernels in C are not built: training on a CPU is slower"
            yield Check("C compiler", "warning", f"{compiler} fails: {said}", means, "apt install gcc libc6-dev")
    problem = compiler_problem("cuda" if torch.cuda.is_available() else "cpu")
    if problem is None:
        yield Check("torch.compile", "ok", "a C++ compiler and Python's headers are here")
    else:
        means = "train.compile: true fails, auto trains uncompiled"
        yield Check("torch.compile", "missing", problem, means, TO_COMPILE)


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
