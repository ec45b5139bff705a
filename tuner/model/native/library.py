"""The kernels in C: compiled once for the processor of this machine, loaded into this process, and called."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tuner.errors import MachineError
from tuner.runtime.files import fsync_path, scratch_dir

SOURCES = Path(__file__).parent
TYPES = (torch.bfloat16, torch.float32)
"""What every kernel takes."""
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip
COMPILE_S = 300
_OPENMP = ("libgomp", "libiomp", "libomp")


def call(function: str, struct: str, **fields: torch.Tensor | float | None) -> int:
    """Call a kernel with its struct, as C declares it; a tensor is handed over as the address of its numbers."""
    plain = {name: one.data_ptr() if isinstance(one, torch.Tensor) else one for name, one in fields.items()}
    run = getattr(library(), function)
    run.restype = ctypes.c_int64
    return int(run(ctypes.byref(_struct(struct)(threads=threads(), **plain))))


@cache
def _struct(name: str) -> type[ctypes.Structure]:
    """A struct of the sources: of pointers, 64-bit integers and doubles."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.c")))
    body = re.findall(r"typedef struct \{([^{}]*)\} (\w+);", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    fields: list[tuple[str, Any]] = []
    for declaration in next(found for found, called in body if called == name).split(";"):
        number = ctypes.c_double if declaration.strip().startswith("double") else ctypes.c_int64
        for part in declaration.split(",") if declaration.strip() else ():
            fields.append((re.findall(r"\w+", part)[-1], ctypes.c_void_p if "*" in part else number))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def is_same(found: torch.Tensor, expected: object, rtol: float, atol: float) -> bool:
    """Whether a kernel gives what a model's own code gives: a tensor of one type and shape, to the rounding."""
    if not isinstance(expected, torch.Tensor) or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    return torch.allclose(found, expected, rtol=rtol, atol=atol)


def threads() -> int:
    """So many threads work on an operation: as many as torch's own take."""
    return torch.get_num_threads()


@cache
def library() -> ctypes.CDLL:
    """The library; compiled for about a second where it is not there yet. Raises MachineError with the reason."""
    path = compiled(sorted(SOURCES.glob("*.c")), sorted(SOURCES.glob("*.h")))
    try:
        _share_openmp()
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise MachineError(f"compiled kernels cannot be loaded: {error}", hint="write model.kernels: torch") from error


def native_problem() -> str | None:
    """Why this machine cannot have the compiled kernels; None where it can."""
    try:
        library()
    except MachineError as error:
        return str(error)
    return None


def _share_openmp() -> None:
    """Let our library find the OpenMP that torch has loaded. Raises OSError where there is none."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "/" in line}):
        if Path(path).name.startswith(_OPENMP):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
    raise OSError("torch has loaded no OpenMP")


def c_compiler() -> str | None:
    """The path of the C compiler: $CC, else the first of cc, gcc and clang that is there."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name))), None)


def compiled(sources: Sequence[Path], headers: Sequence[Path]) -> Path:
    """The shared library of these C sources, compiled where it is not there yet. OpenMP stays to be resolved.

    Kept in $XDG_CACHE_HOME/tuner/kernels, else ~/.cache/tuner/kernels, by the hash of the sources, the compiler and
    the processor; in a directory that only this user may write to. Several processes may ask for it at one time.
    Raises MachineError where it cannot be had.
    """
    if (compiler := c_compiler()) is None:
        raise MachineError("there is no C compiler (cc, gcc, clang)", hint="install one, or write model.kernels: torch")
    directory = _private_directory()
    target = directory / f"{_key(compiler, [*sources, *headers])}.so"
    if target.is_file():
        return target
    with scratch_dir(".tmp-", directory) as work:
        objects = []
        for source in sources:
            objects.append(f"{work}/{source.stem}.o")
            _run([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        made = work / target.name
        # Not linked with OpenMP: the one that torch has loaded serves, two pools of threads would fight for the cores.
        _run([compiler, "-shared", *objects, "-o", str(made), "-lm"])
        fsync_path(made)
        os.replace(made, target)
    return target


def _run(command: list[str]) -> None:
    try:
        plain = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMPILE_S, env=plain, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"the C compiler does not work: {error}", hint="write model.kernels: torch") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise MachineError(f"the C compiler does not work: {reason}", hint="write model.kernels: torch")


def _key(compiler: str, files: Sequence[Path]) -> str:
    """What a library depends on: its sources, how and by what they are compiled, and for which processor."""
    state = hashlib.sha256()
    about = os.stat(os.path.realpath(compiler))
    for part in (compiler, about.st_size, about.st_mtime_ns, FLAGS, platform.machine(), _processor()):
        state.update(f"{part}\0".encode())
    for file in files:
        state.update(file.read_bytes() + b"\0")
    return state.hexdigest()[:32]


def _processor() -> str:
    """Model and features of the processor, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


def _private_directory() -> Path:
    """Where libraries are kept; what lies there is run, so nobody else may write there. Raises MachineError."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    directory = Path(root).expanduser() / "tuner" / "kernels"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except (OSError, RuntimeError) as error:
        raise MachineError(f"{directory}: compiled kernels cannot be kept: {error}") from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise MachineError(
            f"{directory}: others may write to it, and what lies there is run", hint=f"chmod 700 {directory}"
        )
    return directory
