"""What failures cost: the interval between saves, the share of the time that is lost, and a simulation of both.

    python -m tools.failures [--gpus 8,64,512,4096] [--gpu-hours 50000] [--stall 0.7] [--write 8] [--restart 180]
                             [--failures 10000] [--seed 0] [--out FILE]

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
from pathlib import Path
from typing import Any

import numpy as np

from tools.commands import parser_of, say

GPUS = (8, 64, 512, 4096)
GPU_HOURS = 50_000.0
"""Between failures of one GPU: 419 in 54 days of 16,384 GPUs (Llama Team 2024, The Llama 3 herd of models, 3.3.4)."""
STALL, WRITE, RESTART = 0.7, 8.0, 180.0
DEFAULT = 900.0
"""Seconds of `checkpoint.every` where nothing is written."""
APART = 0.05
TRAINING, STAGING, RESTARTING = 0, 1, 2


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
    rng, jobs, horizon = np.random.default_rng(seed), failures, job.between
    clock, work, kept, staged = np.zeros((4, jobs))
    committed = np.full(jobs, np.inf)
    """When what is staged will be on the disk."""
    phase, ends = np.full(jobs, TRAINING), np.full(jobs, interval)
    fails = rng.exponential(job.between, jobs)
    running = np.arange(jobs)
    while len(running):
        now = np.minimum(fails[running], ends[running])
        clock[running] = now
        done = running[committed[running] <= now]
        kept[done], committed[done] = staged[done], np.inf
        failing = fails[running] <= now
        lost, trained, copied, ready = (
            running[failing],
            *(running[~failing & (phase[running] == which)] for which in (TRAINING, STAGING, RESTARTING)),
        )
        work[lost], committed[lost], phase[lost] = kept[lost], np.inf, RESTARTING
        ends[lost] = clock[lost] + job.restart
        fails[lost] = clock[lost] + rng.exponential(job.between, len(lost))
        work[trained] += interval
        waiting = np.where(np.isfinite(committed[trained]), committed[trained], clock[trained])
        phase[trained], ends[trained] = STAGING, waiting + job.stall  # one save at a time
        staged[copied], committed[copied] = work[copied], clock[copied] + job.write
        again = np.concatenate([copied, ready])
        phase[again], ends[again] = TRAINING, clock[again] + interval
        running = running[clock[running] < horizon]
    return 1 - float(work.sum() / clock.sum())


def table(job: Job, gpus: Sequence[int], gpu_hours: float, failures: int, seed: int) -> list[dict[str, Any]]:
    """One record for each number of GPUs: predicted, simulated, with the default interval, and of saves at once."""
    records = []
    for count in gpus:
        one = replace(job, between=3600 * gpu_hours / count)
        at_once = replace(one, stall=one.stall + one.write, write=0.0)
        records.append(
            {
                "gpus": count,
                "hours_between_failures": round(one.between / 3600, 1),
                "interval_s": round(one.interval),
                "lost": round(one.lost(one.interval), 6),
                "lost_by_default": round(one.lost(DEFAULT), 6),
                "lost_at_once": round(at_once.lost(at_once.interval), 6),
                "simulated": round(simulated(one, one.interval, failures, seed), 6) if failures else None,
            }
        )
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
    """Parse the command line, predict, simulate, print; 1 where they differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--gpu-hours", type=float, default=GPU_HOURS)
    for name, value in (("stall", STALL), ("write", WRITE), ("restart", RESTART)):
        parser.add_argument(f"--{name}", type=float, default=value, help="seconds")
    parser.add_argument("--failures", type=int, default=10_000, help="to simulate for each number of GPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    job = Job(0, options.stall, options.write, options.restart)
    gpus = [int(count) for count in options.gpus.split(",")]
    records = table(job, gpus, options.gpu_hours, options.failures, options.seed)
    for line in lines(records):
        say(line)
    report = json.dumps({**asdict(job), "gpu_hours": options.gpu_hours, "jobs": records}, indent=2)
    print(report)
    if options.out:
        options.out.write_text(report + "\n")
    return int(any(abs(record["simulated"] / record["lost"] - 1) > APART for record in records if options.failures))


if __name__ == "__main__":
    raise SystemExit(main())
