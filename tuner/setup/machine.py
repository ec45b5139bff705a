"""What this machine has of what tuner needs: each thing is tried, not asked about, with what follows and what to do."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tuner.data.encoding.tokenizer_files import cache_root
from tuner.errors import TunerError, counted
from tuner.runtime.device import TO_COMPILE, VOLTA, DeviceFacts, compiler_problem, device_facts, host_memory
from tuner.runtime.dist import cores
from tuner.runtime.files import fsync_dir, fsync_path, scratch_dir
from tuner.setup.machine_check import Check, Status

GIB = 1 << 30
LOW_DISK = 10 * GIB
"""Below so much free room a model of a few billion parameters, its checkpoints and exports do not fit."""
BOUNDED = ("torch", "transformers", "peft", "liger-kernel")
"""The libraries whose versions are bounded above: others are not tested."""
EXTRAS = {
    "datasets": ("datasets", "hub data sets (data.train: owner/name:split)"),
    "gigatoken": ("fast", "faster tokenization while data is prepared"),
    "tensorboard": ("tensorboard", "logging.trackers: [tensorboard]"),
    "wandb": ("wandb", "logging.trackers: [wandb]"),
    "mlflow": ("mlflow", "logging.trackers: [mlflow]"),
}
"""Optional libraries: the extra that brings each, and what it is for."""
NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "virtiofs"})


def examine(directory: Path) -> Iterator[Check]:
    """Try everything, one after the other; ``directory`` is where runs would go. What raises is broken."""
    tried: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", _python),
        ("libraries", _libraries),
        ("device", _device),
        ("processor", _processor),
        ("memory", _memory),
        ("compilers", _compilers),
        ("kernels", _kernels),
        ("cache", lambda: _place("cache", cache_root(), "prepared data and downloaded tokenizers")),
        ("runs", lambda: _place("runs", directory, "run directories")),
        ("extras", _extras),
        ("hub", _hub),
    ]
    for name, look in tried:
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
            reason = error.message if isinstance(error, TunerError) else f"{type(error).__name__}: {error}"
            hint = (error.hint if isinstance(error, TunerError) else None) or "run tuner doctor --debug"
            yield Check(name, "broken", reason.splitlines()[0], "commands that need it fail", hint)


def _python() -> Iterator[Check]:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    status: Status = "ok" if platform.system() == "Linux" else "warning"
    means = "" if status == "ok" else "only Linux is tested: native kernels, locks and sandboxes are Linux's"
    yield Check("python", status, found, means)


def _libraries() -> Iterator[Check]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("tuner-lm") or ()]
    except importlib.metadata.PackageNotFoundError:
        means = "tuner runs from a directory that is not installed: ranges of versions are not known"
        yield Check("libraries", "warning", "no metadata of tuner", means, "install the clone: pip install .")
        return
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "broken", "not installed", "tuner needs it", f'pip install "{requirement}"')
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            means = f"outside the tested range {requirement.specifier}: losses, names or formats may differ"
            yield Check(name, "warning", version, means, f'pip install "{requirement}"')
        elif name in BOUNDED:
            yield Check(name, "ok", f"{version}, within {requirement.specifier}")


def _device() -> Iterator[Check]:
    import torch

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
            room = f"{_gib(one.total_bytes)}, {_gib(one.free_bytes)} free"
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
    import torch

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
    import torch

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


def _memory() -> Iterator[Check]:
    total, free = host_memory()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{_gib(total)}, {_gib(free)} free"
    means = f"the control group's limit; the machine has {_gib(physical)}" if total < physical * 0.99 else ""
    yield Check("memory", "ok", found, means)


def _compilers() -> Iterator[Check]:
    import torch

    from tuner.model.native.library import c_compiler

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
    import torch

    from tuner.model.native.library import native_problem

    if torch.cuda.is_available():
        from tuner.setup.machine_cuda import examine_cuda

        yield from examine_cuda()
    elif (problem := native_problem()) is None:
        yield Check("kernels", "ok", "native: those in C are built and loaded")
    else:
        yield Check("kernels", "missing", problem, "model.kernels: auto takes torch's, which is slower on a CPU")


def _place(name: str, path: Path, what: str) -> Iterator[Check]:
    """A directory that is written to: its room, its file system, and whether it can lock, flush and rename."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
    room, kind = shutil.disk_usage(there).free, _filesystem(there)
    found = f"{path}: {_gib(room)} free, {kind}"
    try:
        seconds = _try(there)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            means = f"no locks: tuner refuses to write {what} here"
        else:
            means = f"{what} cannot be written: {error.strerror}"
        yield Check(name, "broken", found, means, "use another directory: output_dir, or TUNER_CACHE for the cache")
        return
    if kind in NETWORK_FILESYSTEMS:
        means = "a network file system: flushes are slow, and locks of other machines may not be seen"
        yield Check(name, "warning", found, means, "put prepared data on a local disk: export TUNER_CACHE=DIR")
    elif room < LOW_DISK:
        yield Check(name, "warning", found, f"little room for {what}", "tuner data gc; tuner runs list")
    else:
        yield Check(name, "ok", f"{found}; it locks, and flushes in {1000 * seconds:.0f} ms", what)


def _try(directory: Path) -> float:
    """Write, flush, rename and lock a file in a directory; returns the seconds of the flush. Raises OSError."""
    with scratch_dir(".tuner-doctor-", directory) as work:
        file = work / "a"
        file.write_bytes(b"0" * 4096)
        started = time.perf_counter()
        fsync_path(file)
        fsync_dir(work)
        seconds = time.perf_counter() - started
        os.rename(file, work / "b")
        with (work / "b").open("rb") as first, (work / "b").open("rb") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return seconds
    raise OSError(errno.ENOLCK, "a lock that is held does not hold")


def _filesystem(path: Path) -> str:
    """The kind of the file system that a path lies on: the mount with the longest name that leads to it."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown file system"
    mounts = [(fields[1], fields[2]) for line in lines if len(fields := line.split()) > 2]
    found = [(mount, kind) for mount, kind in mounts if path.resolve().is_relative_to(mount)]
    return max(found, key=lambda each: len(each[0]))[1] if found else "unknown file system"


def _extras() -> Iterator[Check]:
    for library, (extra, purpose) in EXTRAS.items():
        try:
            version = importlib.metadata.version("mlflow-skinny" if library == "mlflow" else library)
        except importlib.metadata.PackageNotFoundError:
            yield Check(library, "missing", "not installed", purpose, f"pip install {_packages(extra)}")
        else:
            yield Check(library, "ok", version, purpose)


def _packages(extra: str) -> str:
    """What an extra installs, by the metadata of tuner."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires("tuner-lm") or ()]
    except importlib.metadata.PackageNotFoundError:
        return extra
    names = [each.name for each in wanted if each.marker is not None and each.marker.evaluate({"extra": extra})]
    plain = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})}
    return " ".join(name for name in names if name not in plain) or extra


def _hub() -> Iterator[Check]:
    from huggingface_hub import constants, get_token

    where = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        means = "models and data sets come from local directories and the cache alone"
        yield Check("hub", "ok", f"offline (HF_HUB_OFFLINE), cache {constants.HF_HUB_CACHE}", means)
        return
    token = "a token" if get_token() else "no token"
    means = "" if get_token() else "gated models and tuner push need one: hf auth login, or HF_TOKEN"
    yield Check("hub", "ok", f"{where}, {token}, cache {constants.HF_HUB_CACHE}", means)


def _gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB"
