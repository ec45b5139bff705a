"""Attempts with artifacts made to do harm: refused by name, nothing run, no socket, nothing written elsewhere."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.adapters import adapters, pickles
from tests.faults.artifacts import Artifact, Place, artifacts
from tests.faults.bench import Bench
from tests.faults.bombs import data_bombs, header_bombs
from tests.faults.links import links
from tests.faults.supervisor import PATIENCE_S, Trace, supervise
from tests.faults.trials import AnyPoint, Verdict

INTERNET = (2, 10)
MOST_MIB = 500
"""Memory that a process may hold, with all that it imports; sound files of a tiny model take up to 500 MiB of torch."""
GROWTH_MIB = 64
"""What a forked process may add to what it began with; one that adds more is tried again as a command of its own."""
WRITTEN_MIB = 64
"""What the trial's directory may grow by."""
STOP_MIB = 3072
"""Where a bomb is stopped, so that it takes no more of this machine."""


@dataclass(frozen=True)
class HostilePoint(AnyPoint):
    """One attempt."""

    artifact: Artifact

    @property
    def words(self) -> str:
        """What is tried."""
        return self.artifact.name


def hostile_points(bench: Bench) -> Iterator[HostilePoint]:
    """All attempts, numbered."""
    for number, artifact in enumerate(all_artifacts()):
        yield HostilePoint(number, bench.case, "hostile", artifact)


def all_artifacts() -> Iterator[Artifact]:
    """What the files of this directory plant."""
    for each in (artifacts, data_bombs, header_bombs, adapters, pickles, links):
        yield from each()


def hostile_trial(bench: Bench, point: HostilePoint) -> Verdict:
    """One attempt; its memory is judged where nothing was imported for it, if the fork took much."""
    trace, problems = attempt(bench, point.artifact)
    peak = peak_as_a_program(bench, point.artifact) if trace.grown_mib > GROWTH_MIB else 0
    if peak > MOST_MIB:
        problems.append(f"took {peak} MiB")
    where = [f"hostile: {point.words}"]
    return Verdict(point, where, 1, problems, code=trace.code, grown_mib=trace.grown_mib, peak_mib=peak)


def attempt(bench: Bench, artifact: Artifact) -> tuple[Trace, list[str]]:
    """Plant one artifact and run the command that meets it; returns what it did, and what is wrong with that."""
    with _planted(bench, artifact) as place:
        command = place.words(artifact.command)
        before, size = _tree(place.inputs), _mib(bench.root)
        trace = supervise(lambda: _bounded(bench, command), bench.root)
        wrong = _wrong(bench, artifact, trace)
        if place.canary.exists():
            wrong.append("its code ran")
        if _tree(place.inputs) != before:
            wrong.append("the inputs were changed")
        if (grown := _mib(bench.root) - size) > WRITTEN_MIB:
            wrong.append(f"wrote {grown} MiB")
    return trace, wrong


@contextmanager
def _planted(bench: Bench, artifact: Artifact) -> Iterator[Place]:
    """The trained run with the artifact in it, which a process of its own plants: some take much memory to be made."""
    bench.restore("trained")
    inputs, kept = bench.directory / "inputs", bench.directory / "inputs-kept"
    if not kept.exists():
        shutil.copytree(inputs, kept)
    place = Place(bench.root, inputs, bench.directory / "canary")
    try:
        planted = supervise(lambda: artifact.plant(place) and 0 or 0, bench.root)
        if planted.code:
            raise RuntimeError(f"{artifact.name} was not planted: {planted.output}")
        yield place
    finally:
        shutil.rmtree(inputs)
        shutil.copytree(kept, inputs)
        place.canary.unlink(missing_ok=True)


_SMALL = """\
import os, sys
child = os.posix_spawn(sys.executable, [sys.executable, "-m", "tuner", *sys.argv[1:]], os.environ)
print(os.wait4(child, 0)[2].ru_maxrss, file=sys.__stdout__)
"""
"""A small process that starts the command: what a process held before it became another program is counted to it."""


def peak_as_a_program(bench: Bench, artifact: Artifact) -> int:
    """The most memory of the command as a program of its own, in MiB."""
    with _planted(bench, artifact) as place:
        own = {"TUNER_CACHE": str(bench.root / "cache"), "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", _SMALL, *place.words(artifact.command)], cwd=bench.root, env={**os.environ, **own},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, preexec_fn=_bound,
        )  # fmt: skip
    return int(done.stdout.splitlines()[-1]) >> 10


def _bound(held_kib: int = 0) -> None:
    """Bounds of a process that has `held_kib` of memory to write to before it begins."""
    bounds = {"DATA": (STOP_MIB << 20) + (held_kib << 10), "FSIZE": STOP_MIB << 18, "CPU": int(PATIENCE_S)}
    for name, bound in bounds.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (bound, bound))


def _bounded(bench: Bench, command: tuple[str, ...]) -> int:
    # A fork has all that its parent has, which after thousands of tests is more than the whole bound.
    (held,) = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    _bound(int(held))
    return bench.work(command)


def _wrong(bench: Bench, artifact: Artifact, trace: Trace) -> list[str]:
    temporary = tempfile.gettempdir() + "/"  # where libraries try whether they could write, and leave nothing
    kept = (call for call in bench.outside(trace) if os.path.lexists(call.path) or not call.path.startswith(temporary))
    wrong = [f"wrote {call.path}" for call in kept]
    wrong += ["opened a socket" for call in trace.others if call.kind == "socket" and call.flags in INTERNET]
    shells = [call.path for call in trace.others if call.kind == "program" and call.path.endswith(("/sh", "/touch"))]
    wrong += [f"ran {path}" for path in shells]
    if trace.hung:
        wrong.append("hung")
    codes = {True: (2, 3, 4, 6), False: (0,), None: (0, 2, 3, 4, 6)}[artifact.refused]
    if trace.code not in codes:
        wrong.append(f"exit code {trace.code}: {trace.output[-300:]}")
    if artifact.named not in trace.output and (trace.code or artifact.refused is not None):
        wrong.append(f"does not name {artifact.named}: {trace.output[-300:]}")
    if "a bug in tuner" in trace.output:
        wrong.append(f"is told as a bug: {trace.output[-300:]}")
    return wrong


def _mib(directory: Path) -> int:
    return sum(os.lstat(path).st_blocks for path in directory.rglob("*")) >> 11


def _tree(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.rglob("*"):
        with suppress(OSError):
            found[str(path)] = b"" if path.is_symlink() or not path.is_file() else _content(path)
    return found


def _content(path: Path) -> bytes:
    """What tells of a change; of a large file its size and time."""
    facts = path.stat()
    return path.read_bytes() if facts.st_size < 1 << 20 else f"{facts.st_size} {facts.st_mtime_ns}".encode()
