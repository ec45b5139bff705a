"""What this machine has of what tuner needs: each thing is tried, not asked about, with what follows and what to do."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from tuner.errors import TunerError
from tuner.runtime.files import fsync_dir, fsync_path, scratch_dir
from tuner.runtime.memory import host_memory
from tuner.setup.machine_check import GIB, Check, Status, gib
from tuner.stages import cache_root

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
        ("device", lambda: _with_torch("device")),
        ("processor", lambda: _with_torch("processor")),
        ("memory", _memory),
        ("compilers", lambda: _with_torch("compilers")),
        ("kernels", lambda: _with_torch("kernels")),
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


def _with_torch(what: str) -> Iterator[Check]:
    """What is tried with torch, of which none but these is to break where it cannot be imported."""
    from tuner.setup.machine_torch import TRIED

    yield from TRIED[what]()


def _python() -> Iterator[Check]:
    found = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    status: Status = "ok" if platform.system() == "Linux" else "warning"
    means = "" if status == "ok" else "only Linux is tested: native kernels, locks and sandboxes are Linux's"
    yield Check("python", status, found, means)


def _libraries() -> Iterator[Check]:
    if not (wanted := _wanted()):
        means = "tuner runs from a directory that is not installed: ranges of versions are not known"
        yield Check("libraries", "warning", "no metadata of tuner", means, "install the clone: pip install .")
        return
    for requirement in wanted:
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


def _wanted(extra: str = "") -> list[Requirement]:
    """What tuner requires here, with an extra or without any; nothing where it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        wanted = map(Requirement, importlib.metadata.requires("tuner-lm") or ())
        return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]
    return []


def _memory() -> Iterator[Check]:
    total, free = host_memory()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{gib(total)}, {gib(free)} free"
    means = f"the control group's limit; the machine has {gib(physical)}" if total < physical * 0.99 else ""
    yield Check("memory", "ok", found, means)


def _place(name: str, path: Path, what: str) -> Iterator[Check]:
    """A directory that is written to: its room, its file system, and whether it can lock, flush and rename."""
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.is_dir())
    room, kind = shutil.disk_usage(there).free, _filesystem(there)
    found = f"{path}: {gib(room)} free, {kind}"
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
    mounts = [one for one in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(one.mountpoint)]
    return str(max(mounts, key=lambda one: len(one.mountpoint)).fstype) if mounts else "unknown file system"


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
    plain = {each.name for each in _wanted()}
    return " ".join(each.name for each in _wanted(extra) if each.name not in plain) or extra


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
