"""Bits flipped and files cut in checkpoints: each must be noticed, its file named, and the one before used."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.faults.bench import Bench
from tests.faults.cases import RUN
from tests.faults.trials import AnyPoint, Verdict

FULLY = 50
"""Every so many trials the whole run goes on from what is left."""


@dataclass(frozen=True)
class DamagePoint(AnyPoint):
    """One damaged file of the newest checkpoint; `place` is a fraction of its bytes."""

    file: str
    kind: Literal["flip", "cut"]
    place: float
    bit: int

    @property
    def words(self) -> str:
        """What happens, in a line."""
        return f"bit {self.bit} flipped at {self.place:.4f}" if self.kind == "flip" else f"cut at {self.place:.4f}"


def damage_points(benches: Sequence[Bench], count: int, seed: int) -> Iterator[DamagePoint]:
    """Flips and cuts over all files of the newest checkpoint, as often in each."""
    rng = random.Random(seed)
    benches = [bench for bench in benches if len(bench.sound.kept) > 1]  # the others have none to fall back to
    files = {bench.case: sorted(path.name for path in newest_dir(bench, "trained")) for bench in benches}
    for number in range(count):
        bench = benches[number % len(benches)]
        names = files[bench.case]
        kind: Literal["flip", "cut"] = "cut" if rng.random() < 0.25 else "flip"
        yield DamagePoint(number, bench.case, "resume", rng.choice(names), kind, rng.random(), rng.randrange(8))


def newest_dir(bench: Bench, start: str) -> list[Path]:
    """The files of the newest checkpoint of a starting point."""
    step = max(int(path.name[5:]) for path in (bench.directory / start / RUN / "checkpoints").glob("step-*"))
    return list((bench.directory / start / RUN / "checkpoints" / f"step-{step}").iterdir())


def damage_trial(bench: Bench, point: DamagePoint) -> Verdict:
    """Damage one file, look for the newest checkpoint, and now and then let the run go on from the one before."""
    from tuner.checkpoint.load import content_sha256
    from tuner.checkpoint.open import newest, open_checkpoint
    from tuner.errors import DataError

    bench.restore("trained")
    steps = sorted(int(path.name[5:]) for path in (bench.root / RUN / "checkpoints").iterdir())
    path = bench.root / RUN / "checkpoints" / f"step-{steps[-1]}" / point.file
    data = path.read_bytes()
    at = int(point.place * len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << point.bit]) + data[at + 1 :]
    path.write_bytes(flipped if point.kind == "flip" else data[:at])
    verdict = Verdict(point, [f"damage: {point.kind} {point.file}"], 1)
    try:
        open_checkpoint(path.parent)
        verdict.problems.append("half made: the damaged checkpoint opens")
    except DataError as error:
        if point.file not in error.message:
            verdict.problems.append(f"the error names no file: {error.message}")
    warnings: list[str] = []
    found = newest(path.parent.parent, warnings.append)
    if found is None or found.step != steps[-2]:
        verdict.problems.append(f"step {steps[-2]} should be used, not {found and found.step}")
    elif content_sha256(found) != bench.sound.sha256[found.step]:
        verdict.problems.append(f"half made: step {found.step} holds other tensors")
    if len(warnings) != 1 or point.file not in warnings[0]:
        verdict.problems.append(f"the warning names no file: {warnings}")
    if point.number % FULLY == 0:
        verdict.problems += _go_on(bench, point)
    return verdict


def _go_on(bench: Bench, point: DamagePoint) -> list[str]:
    """Resume a run whose record says that it has not ended; it must end as the unbroken one did."""
    record = bench.root / RUN / "run.json"
    record.write_text(record.read_text().replace('"status": "finished"', '"status": "running"'))
    trace = bench.run(("resume", str(RUN)))
    if trace.code:
        return [f"exit code {trace.code}: {trace.output[-300:]}"]
    if point.file not in trace.output:
        return ["the damaged file is not named to the user"]
    return bench.final_problems(bench.jobs["train"])
