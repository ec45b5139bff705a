"""C sources compiled for the processor of this machine, once, and kept for the next start."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tuner.errors import MachineError
from tuner.runtime.files import fsync_path

FLAGS = (
    "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-w",
)  # fmt: skip
COMPILE_S = 300


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
    compiler = c_compiler()
    if compiler is None:
        raise MachineError("there is no C compiler (cc, gcc, clang)", hint="install one, or write model.kernels: torch")
    directory = _private_directory()
    target = directory / f"{_key(compiler, [*sources, *headers])}.so"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=directory) as work:
        objects = []
        for source in sources:
            objects.append(f"{work}/{source.stem}.o")
            _run([compiler, *FLAGS, "-c", str(source), "-o", objects[-1]])
        made = Path(work) / target.name
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
