"""What failures cost: the interval between saves, the share of the time that is lost, and a simulation of both.

    python -m tools.failures [--gpus 8 64 512 4096] [--gpu-hours 50000] [--stall 0.7] [--write 8] [--restart 180]
                             [--failures 10000] [--seed 0]

A job of N GPUs fails every `gpu-hours / N` hours on average, at any moment alike. A save stands training still for
`stall` seconds and is committed `write` seconds later, while training continues; `restart` is the time from a failure
to the next step of training: until it is noticed, processes start, the checkpoint is loaded. The formula is that of
Daly (2006, A higher order estimate of the optimum checkpoint interval, equation 12) for the interval of Young (1974, A
first order approximation to the optimum checkpoint interval); what is committed late counts as a longer restart. The
simulation knows none of them: it draws failures for many jobs and moves each from event to event.

Prints a table on stderr and one JSON object on stdout; exits 1 where both differ by more than 5 %.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tools.commands import asked, say

GPUS = (8, 64, 512, 4096)
GPU_HOURS = 50_000.0
"""Between failures of one GPU: 419 in 54 days of 16,384 GPUs (Llama Team 2024, The Llama 3 herd of models, 3.3.4)."""
STALL, WRITE, RESTART = 0.7, 8.0, 180.0
DEFAULT = 900.0
"""Seconds of `checkpoint.every` where nothing is written."""
APART = 0.05


@dataclass(frozen=True)
class Job:
    """What loses time, in seconds: mean time between failures, stall and write of a save, and restart."""

    between: float
    stall: float
    write: float
    restart: float

    @property
    def interval(self) -> float:
        """The training time between saves that loses least: Young's, but no less than a save takes to be written."""
        return max(math.sqrt(2 * self.stall * self.between), self.write)

    def lost(self, interval: float) -> float:
        """The share of the time that neither trains nor counts, with so much training between saves."""
        late, cycle = math.exp((self.restart + self.write) / self.between), (interval + self.stall) / self.between
        return 1 - interval / self.between / (late * math.expm1(cycle))


def simulated(job: Job, interval: float, failures: int, seed: int) -> float:
    """The share that many jobs lost together, with about so many failures of all."""
    rng = np.random.default_rng(seed)
    clock, work, kept, committed = np.zeros((4, failures))
    fails = rng.exponential(job.between, failures)
    while len(running := np.flatnonzero(clock < job.between)):
        # Training, and a save: one at a time, so that the save before it is committed by then.
        staged = np.maximum(clock[running] + interval, committed[running]) + job.stall
        saves = staged < fails[running]
        saved, lost = running[saves], running[~saves]
        clock[saved], kept[saved], committed[saved] = staged[saves], work[saved], staged[saves] + job.write
        work[saved] += interval
        work[lost] = np.where(committed[lost] <= fails[lost], work[lost], kept[lost])
        clock[lost], kept[lost], committed[lost] = fails[lost] + job.restart, work[lost], 0.0
        fails[lost] += rng.exponential(job.between, len(lost))
    return 1 - float(work.sum() / clock.sum())


def table(job: Job, gpus: Sequence[int], gpu_hours: float, failures: int, seed: int) -> list[dict[str, Any]]:
    """One record for each number of GPUs: predicted, simulated, with the default interval, and of saves at once."""
    records = []
    for count in gpus:
        one = replace(job, between=3600 * gpu_hours / count)
        at_once = replace(one, stall=one.stall + one.write, write=0.0)
        shares = {"lost": one.lost(one.interval), "lost_by_default": one.lost(DEFAULT)}
        shares["lost_at_once"] = at_once.lost(at_once.interval)
        if failures:
            shares["simulated"] = simulated(one, one.interval, failures, seed)
        record = {"gpus": count, "hours_between_failures": round(one.between / 3600, 1)}
        record |= {"interval_s": round(one.interval), **{name: round(share, 6) for name, share in shares.items()}}
        records.append(record)
    return records


def lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/distributed.md."""
    return [
        f"| {record['gpus']:,} | {record['hours_between_failures']:,} h | {duration(record['interval_s'])} "
        + "".join(f"| {100 * record[name]:.2f} % " for name in ("lost", "lost_by_default", "lost_at_once")) + "|"
        for record in records
    ]


def duration(seconds: float) -> str:
    """Minutes and seconds, such as `4 min 10 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def main() -> int:
    """Predict, simulate, print; 1 where they differ."""
    given = asked(
        __doc__, gpus=list(GPUS), gpu_hours=GPU_HOURS, stall=(STALL, "seconds"), write=(WRITE, "seconds"),
        restart=(RESTART, "seconds"), failures=(10_000, "to simulate for each number of GPUs"), seed=0,
    )
    job = Job(0, given.stall, given.write, given.restart)
    records = table(job, given.gpus, given.gpu_hours, given.failures, given.seed)
    for line in lines(records):
        say(line)
    print(json.dumps({**asdict(job), "gpu_hours": given.gpu_hours, "jobs": records}, indent=2))
    return int(any(abs(record["simulated"] / record["lost"] - 1) > APART for record in records if given.failures))


if __name__ == "__main__":
    raise SystemExit(main())
