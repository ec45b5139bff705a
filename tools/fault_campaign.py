"""Strike tuner at its system calls, and hold what is left, and what it ends in, against unbroken work.

    python -m tools.fault_campaign kills                        every call of every job, before it and in mid-write
    python -m tools.fault_campaign compound --count 1000        killed again, once or twice, while it recovers
    python -m tools.fault_campaign power --count 1000           states that a disk may hold after a power loss
    python -m tools.fault_campaign errors                       a full disk, EIO and short writes at every call
    python -m tools.fault_campaign ranks --count 300            two processes train; all die, or one of them alone
    python -m tools.fault_campaign meshes --count 100           the same of those that share layers, rows, experts
    python -m tools.fault_campaign damage --count 2000          bits flipped and files cut in the newest checkpoint
    python -m tools.fault_campaign hostile                      artifacts made to do harm, in runs, models, tokenizers
    python -m tools.fault_campaign kills --point 1234           one trial again, with what it found

The jobs are whole commands on a tiny model: prepare-data, train (with saves, evaluations and pruning), resume of a run
that was killed before, and export-hf. They run in children of one process that has imported everything; the kernel's
filter (seccomp) tells of their calls, whatever language, thread or process makes them. After each trial nothing
half-made may look whole, no committed step may be lost, and the same command again must end in the same tensors
(SHA-256), log, samples and order of rows as unbroken work, with nothing left over. Prints one line of JSON for a trial
that failed, and the figures at the end; exits with 1 when a trial failed.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.bench import Bench, fork_server, scratch
from tests.faults.cases import CASES, MESHES, Case
from tests.faults.damage import damage_points, damage_trial
from tests.faults.evidence import label, phase
from tests.faults.hostile import hostile_points, hostile_trial
from tests.faults.notify import unavailable
from tests.faults.trials import (
    AnyPoint,
    Verdict,
    compound_points,
    error_points,
    error_trial,
    kill_points,
    kill_trial,
    power_points,
    power_trial,
    rank_points,
)
from tools.commands import asked, one_of

Trial = Callable[[Bench, Any], Verdict]
PARTS: dict[str, Trial] = {
    "kills": kill_trial, "compound": kill_trial, "power": power_trial, "errors": error_trial, "ranks": kill_trial,
    "meshes": kill_trial, "damage": damage_trial, "hostile": hostile_trial,
}
COUNTED = {
    "compound": compound_points, "power": power_points, "ranks": rank_points, "meshes": rank_points,
    "damage": damage_points,
}  # fmt: skip
"""Points drawn by the seed: as many as are asked for."""


def points_of(part: str, benches: Sequence[Bench], options: argparse.Namespace) -> list[AnyPoint]:
    """The points of a part of the campaign, numbered."""
    if part in COUNTED:
        return list(COUNTED[part](benches, options.skip + (options.count or 1000), options.seed))
    if part == "hostile":
        return list(hostile_points(benches[0]))
    points = list((kill_points if part == "kills" else error_points)(benches, options.jobs))
    if options.point is None:
        random.Random(options.seed).shuffle(points)
    return points


def of_part(part: str) -> dict[str, Case]:
    """The trainings that a part strikes, by name."""
    return MESHES if part == "meshes" else CASES


def chosen(points: list[AnyPoint], options: argparse.Namespace) -> list[AnyPoint]:
    """One point, or so many after those that are left out."""
    if options.point is not None:
        return [point for point in points if point.number == options.point]
    stop = None if options.count is None else options.skip + options.count
    return points[options.skip : stop]


def figures(part: str, verdicts: Sequence[Verdict], benches: dict[str, Bench], seconds: float) -> dict[str, Any]:
    """What the campaign showed."""
    calls = [(case, job, call) for case, b in benches.items() for job, t in b.traces.items() for call in t.calls]
    distinct = {(case, job, phase(call), label(call, benches[case].root)) for case, job, call in calls}
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    return {
        "part": part, "trials": len(verdicts), "failed": sum(bool(verdict.problems) for verdict in verdicts),
        "struck": sum(verdict.struck for verdict in verdicts),
        "distinct_points": len({(v.point.case, v.point.job, v.point.words, *v.where) for v in verdicts}),
        "calls_of_unbroken_work": len(calls), "distinct_call_file_phase": len(distinct),
        "struck_call_file_phase": len({(v.point.case, v.point.job, where) for v in verdicts for where in v.where}),
        "by_phase": dict(Counter(where.partition(":")[0] for v in verdicts for where in v.where)),
        "by_job": dict(Counter(verdict.point.job for verdict in verdicts)),
        "torn_loads": sum(problem.startswith(("half made", "step-")) for problem in problems),
        "lost_steps": sum(verdict.lost_steps for verdict in verdicts),
        "ms_median": round(statistics.median(verdict.ms for verdict in verdicts)),
        "peak_mib": max(verdict.peak_mib for verdict in verdicts), "seconds": round(seconds),
    }


def main() -> int:
    """Run one part of the campaign."""
    options = asked(
        __doc__, {"part": one_of(PARTS)}, count=(int, "trials; all points without it, where they can be counted"),
        skip=(0, "trials to leave out: those of a campaign that goes on"),
        point=(int, "the number of one point to try again"), seed=0,
        cases=({"nargs": "+", "choices": [*CASES, *MESHES]}, "all of the part's without it"),
        jobs=([], "of prepare, train, resume and export"),
        beside=(False, "save beside training (checkpoint.async_save)"),
        settings=("", "a line of the recipe, such as 'optimizer: {offload: host}'"),
        out=(Path, "a file that gets a line of JSON for every trial"),
        list=(False, "print the distinct points: job, phase, call and file"),
    )
    if unavailable():
        raise SystemExit(unavailable())
    options.cases = options.cases or (["lora"] if options.part == "hostile" else [*of_part(options.part)])
    if options.beside and not options.jobs:
        options.jobs = ["train", "resume"]  # the others save nothing
    with fork_server(), scratch() as directory:
        processes = 2 if options.part == "ranks" else 1
        benches = dict[str, Bench]()
        for case in options.cases:
            bench = benches[case] = Bench(directory / case, case, options.beside, processes, options.settings)
            bench.set_up()
        if options.list:
            print_points(benches)
            return 0
        started, verdicts = time.monotonic(), []
        for point in chosen(points_of(options.part, list(benches.values()), options), options):
            began = time.monotonic()
            verdict = PARTS[options.part](benches[point.case], point)
            verdict.ms = (time.monotonic() - began) * 1000
            verdicts.append(verdict)
            if verdict.problems or options.point is not None:
                print(json.dumps(verdict.as_json()), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(verdict.as_json()) + "\n")
            if len(verdicts) % 100 == 0:
                print(f"{len(verdicts)} trials, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        found = figures(options.part, verdicts, benches, time.monotonic() - started)
    settings = {"seed": options.seed, "skip": options.skip, "cases": options.cases, "beside": options.beside}
    print(json.dumps(found | settings), flush=True)
    return 1 if found["failed"] else 0


def print_points(benches: dict[str, Bench]) -> None:
    """Each distinct point of unbroken work, and how often its call is made."""
    counts: Counter[str] = Counter()
    for bench in benches.values():
        for job, trace in bench.traces.items():
            counts.update(f"{job} {phase(call)}: {label(call, bench.root)}" for call in trace.calls)
    for name, count in sorted(counts.items()):
        print(f"{count:5} {name}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # libraries that were imported for the children complain about being left unused
