"""Attempts with artifacts made to do harm: refused by name, nothing run, no socket, nothing written elsewhere."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.artifacts import Artifact, Place, artifacts
from tests.faults.bench import Bench
from tests.faults.supervisor import Trace
from tests.faults.trials import Verdict

INTERNET = (2, 10)


@dataclass(frozen=True)
class HostilePoint:
    """One attempt, by its number."""

    number: int
    case: str
    artifact: Artifact
    job: str = "hostile"

    @property
    def words(self) -> str:
        """What is tried."""
        return self.artifact.name


def hostile_points(bench: Bench) -> Iterator[HostilePoint]:
    """All attempts, numbered."""
    for number, artifact in enumerate(artifacts()):
        yield HostilePoint(number, bench.case, artifact)


def hostile_trial(bench: Bench, point: HostilePoint) -> Verdict:
    """One attempt."""
    started = time.monotonic()
    _, problems = attempt(bench, point.artifact)
    ms = (time.monotonic() - started) * 1000
    return Verdict(point, [f"hostile: {point.words}"], 1, problems, ms=ms)


def attempt(bench: Bench, artifact: Artifact) -> tuple[Trace, list[str]]:
    """Plant one artifact and run the command that meets it; returns what it did, and what is wrong with that."""
    bench.restore("trained")
    inputs, kept = bench.directory / "inputs", bench.directory / "inputs-kept"
    if not kept.exists():
        shutil.copytree(inputs, kept)
    canary = bench.directory / "canary"
    place = Place(bench.root, inputs, canary)
    try:
        artifact.plant(place)
        before = _tree(inputs)
        trace = bench.run(artifact.command(place))
        wrong = _wrong(bench, artifact, trace)
        if canary.exists():
            wrong.append("its code ran")
        if _tree(inputs) != before:
            wrong.append("the inputs were changed")
    finally:
        shutil.rmtree(inputs)
        shutil.copytree(kept, inputs)
        canary.unlink(missing_ok=True)
    return trace, wrong


def _wrong(bench: Bench, artifact: Artifact, trace: Trace) -> list[str]:
    temporary = tempfile.gettempdir() + "/"  # where libraries try whether they could write, and leave nothing
    kept = (call for call in bench.outside(trace) if os.path.lexists(call.path) or not call.path.startswith(temporary))
    wrong = [f"wrote {call.path}" for call in kept]
    wrong += ["opened a socket" for call in trace.others if call.kind == "socket" and call.flags in INTERNET]
    shells = [call.path for call in trace.others if call.kind == "program" and call.path.endswith(("/sh", "/touch"))]
    wrong += [f"ran {path}" for path in shells]
    if trace.hung:
        wrong.append("hung")
    if artifact.refused and trace.code not in (2, 3, 4, 5):
        wrong.append(f"exit code {trace.code}: {trace.output[-300:]}")
    if artifact.named not in trace.output:
        wrong.append(f"does not name {artifact.named}: {trace.output[-300:]}")
    if "a bug in tuner" in trace.output:
        wrong.append(f"is told as a bug: {trace.output[-300:]}")
    return wrong


def _tree(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.rglob("*"):
        with suppress(OSError):
            found[str(path)] = path.read_bytes() if path.is_file() else b""
    return found
