"""Measures packing against its lower bound, the planner's balance, and the memory of cutting and packing.

Four parts, the first three unless named; a table on stderr, one JSON object on stdout, CPU seconds of one thread:

packing   a million lognormal lengths (median 400, sigma 1.2, clipped to the row) and a hard set, two thirds of which
          are above half a row, at 4k, 8k and 32k. Efficiency is the lower bound (that items above half a row share
          with none of their kind is in it) over the rows used. Beside it, in turn, TRL's `pack_dataset` ("bfd") where
          it is installed. It copies tokens (of one byte here) as it packs; ours plans and leaves them where they are.
planner   the time of a step over what it would be if no rank waited: sum over micro-batches of the costliest rank,
          times ranks, over the sum of costs; with rows in order, and dealt.
memory    the peak of a process that cuts and packs five million documents, and makes their record batches.
scale     packs a million to a hundred million lengths (lognormal, mean 600, rows of 4,096) and writes their rows; then
          walks the shuffled order of an epoch. Each in a process of its own, with its peak.

Exits 1 when packing needs more than a second or less than 99.99 % efficiency, or memory passes 300 MiB (2 GB at scale),
or rows at scale are less than 99.9 % full.

    OMP_NUM_THREADS=1 python -m tools.bench_pack [packing] [planner] [memory] [scale] [--items N] [--rounds N]
                                                 [--no-peer] [--out FILE]
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from tools.commands import asked, workplace
from tools.measures import alternated
from tools.measures import memory as peak
from tuner.data.batches import GlobalBatches, balance_rows, row_costs
from tuner.data.building.bins import lower_bound, pack
from tuner.data.building.pack import BLOCK_SEGMENTS, Segments, cut, row_batches
from tuner.data.building.rows import write_rows
from tuner.data.prepared import COUNTS, PackedRows, arrow, open_stream, row_counts

CAPACITIES = (4096, 8192, 32768)
EFFICIENCY, SECONDS, PEAK_MIB = 0.9999, 1.0, 300
SCALE_MIB, SCALE_FILL = 1907, 0.999
SCALE_DOCUMENTS = (1_000_000, 10_000_000, 100_000_000)
PEER_SLICE = 20_000
"""Documents given to TRL at once: a multiple of its windows of 1,000 rows, so the slices change nothing but memory."""
MEMORY_DOCUMENTS = 5_000_000
Packer = Callable[[np.ndarray, int], tuple[int, float]]
"""(lengths, capacity) -> (rows, CPU seconds)."""


def lognormal(items: int, capacity: int) -> np.ndarray:
    """Lengths of chat documents: median 400, sigma 1.2."""
    return np.clip(np.random.default_rng(0).lognormal(math.log(400), 1.2, items), 1, capacity).astype(np.int64)


def hard(items: int, capacity: int) -> np.ndarray:
    """Two thirds of the lengths above half a row, mixed with the others."""
    rng, long = np.random.default_rng(1), 2 * items // 3
    return rng.permutation(
        np.concatenate(
            [rng.integers(capacity // 2 + 1, capacity + 1, long), rng.integers(1, capacity // 2 + 1, items - long)]
        )
    )


def ours(lengths: np.ndarray, capacity: int) -> tuple[int, float]:
    started = time.process_time()
    _, offsets = pack(lengths, capacity)
    return len(offsets) - 1, time.process_time() - started


def trl_packer() -> Packer | None:
    """TRL's packing of a data set whose only column has these lengths; None where it is not installed."""
    try:
        import datasets
        from trl import pack_dataset
    except ImportError:
        return None
    datasets.disable_progress_bars()

    def packed(lengths: np.ndarray, capacity: int) -> tuple[int, float]:
        rows, seconds = 0, 0.0
        for start in range(0, len(lengths), PEER_SLICE):
            offsets = np.concatenate([[0], np.cumsum(lengths[start : start + PEER_SLICE])])
            tokens = pa.array(np.zeros(offsets[-1], dtype=np.uint8))
            column = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), tokens)
            dataset = datasets.Dataset(pa.table({"input_ids": column}))
            started = time.process_time()
            result = pack_dataset(dataset, capacity, "bfd", {"keep_in_memory": True, "load_from_cache_file": False})
            seconds += time.process_time() - started
            rows += len(result)
        return rows, seconds

    return packed


def packing(items: int, rounds: int, peer: Packer | None) -> list[dict[str, Any]]:
    """One record for each set and capacity: rows, bound, efficiency and median seconds, of ours and of the peer."""
    records = []
    for make in (lognormal, hard):
        for capacity in CAPACITIES:
            lengths = make(items, capacity)
            bound = lower_bound(np.bincount(lengths, minlength=capacity + 1))
            packers = {"tuner": ours} | ({"trl": peer} if peer else {})
            found = alternated({name: partial(packer, lengths, capacity) for name, packer in packers.items()}, rounds)
            record: dict[str, Any] = {"set": make.__name__, "capacity": capacity, "items": items, "bound": bound}
            record["sum_bound"] = -(-int(lengths.sum()) // capacity)
            for name, runs in found.items():
                rows = runs[0][0]
                seconds = statistics.median(run[1] for run in runs)
                record[name] = {"rows": rows, "efficiency": bound / rows, "seconds": round(seconds, 4)}
            records.append(record)
    return records


def waiting(costs: np.ndarray, plan: list[list[np.ndarray]], ranks: int) -> float:
    """The time of a step over that of one in which no rank waits."""
    slowest = sum(max(int(costs[share].sum()) for share in shares) for shares in plan)
    return float(slowest * ranks / int(costs.sum()))


def in_order(n_rows: int, n_micro: int, ranks: int) -> list[list[np.ndarray]]:
    """Rows as they come, in equal numbers."""
    cells = np.array_split(np.arange(n_rows), n_micro * ranks)
    return [cells[i : i + ranks] for i in range(0, n_micro * ranks, ranks)]


def planner(items: int, steps: int = 50) -> list[dict[str, Any]]:
    """Imbalance over random steps of eight rows a rank, packed and one document a row."""
    records = []
    for capacity in (4096, 32768):
        lengths = lognormal(items, capacity)
        order, offsets = pack(lengths, capacity)
        for rows, squares, tokens in (
            ("packed", *(np.add.reduceat(of[order], offsets[:-1]) for of in (lengths**2, lengths))),
            ("one document", lengths**2, lengths),
        ):
            costs = row_costs(tokens, squares)
            for ranks in (2, 4, 8):
                for micro in (1, 4):
                    found: dict[str, list[float]] = {
                        "before": [], "after": [], "squares_before": [], "squares_after": [],
                    }
                    rng, spent = np.random.default_rng(2), 0.0
                    for _ in range(steps):
                        chosen = rng.choice(len(costs), 8 * ranks, replace=False)
                        n_micro = 8 // micro
                        started = time.process_time()
                        dealt = balance_rows(costs[chosen], n_micro, ranks, micro)
                        spent += time.process_time() - started
                        before = in_order(len(chosen), n_micro, ranks)
                        for key, of in (("", costs), ("squares_", squares)):
                            found[f"{key}before"].append(waiting(of[chosen], before, ranks))
                            found[f"{key}after"].append(waiting(of[chosen], dealt, ranks))
                    records.append(
                        {"capacity": capacity, "rows": rows, "ranks": ranks, "micro_batch_size": micro}
                        | {key: round(statistics.mean(values), 4) for key, values in found.items()}
                        | {"plan_ms": round(spent / steps * 1e3, 3)}
                    )
    return records


def documents(count: int) -> Iterator[pa.RecordBatch]:
    """Record batches of 2,000 documents with lognormal lengths, all tokens trained."""
    rng = np.random.default_rng(3)
    flags = pa.Array.from_buffers(pa.bool_(), 1 << 23, [None, pa.py_buffer(np.full(1 << 20, 255, dtype=np.uint8))])
    for first in range(0, count, 2000):
        lengths = np.clip(rng.lognormal(math.log(400), 1.2, min(2000, count - first)), 1, 1 << 20).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        lists = pa.ListArray.from_arrays(arrow(offsets.astype(np.int32)), flags.slice(0, int(offsets[-1])))
        yield pa.record_batch([lists], names=["trained"])


def measure_memory(count: int, capacity: int) -> dict[str, Any]:
    """What this process takes to cut and pack `count` documents, in MiB, and the seconds of both."""
    at_start = peak("VmHWM") >> 20
    started = time.process_time()
    segments = cut(documents(count), capacity, "split")
    cut_seconds = time.process_time() - started
    started = time.process_time()
    rows = sum(batch.num_rows for batch in row_batches(segments, capacity, packing=True))
    return {
        "documents": count, "capacity": capacity, "tokens": int(segments.tokens.sum()), "rows": rows,
        "at_start_mib": at_start, "peak_mib": peak("VmHWM") >> 20,
        "cut_seconds": round(cut_seconds, 3), "pack_seconds": round(time.process_time() - started, 3),
    }  # fmt: skip


def blocks_of(count: int, capacity: int) -> Iterator[Segments]:
    """Segments as cutting gives them, with lognormal lengths of mean 600, in blocks."""
    rng = np.random.default_rng(3)
    for first in range(0, count, BLOCK_SEGMENTS):
        stops = np.empty(min(BLOCK_SEGMENTS, count - first), dtype=np.uint32)
        for part in np.split(stops, range(1 << 17, len(stops), 1 << 17)):
            part[:] = np.clip(rng.lognormal(math.log(400), 0.9, len(part)), 2, capacity)
        numbers = np.arange(first, first + len(stops), dtype=np.uint32)
        yield Segments(numbers, np.broadcast_to(np.uint32(0), len(stops)), stops, stops - np.uint32(1))
        del stops, numbers, part


def measure_scale(count: int, capacity: int) -> dict[str, Any]:
    """What it takes to write the rows of `count` lengths of mean 600, and to walk an epoch of them."""
    with workplace() as work:
        path, started = work / "train.rows.arrow", time.process_time()
        report = write_rows(path, blocks_of(count, capacity), capacity)
        packed, peak_mib = time.process_time() - started, peak("VmHWM") >> 20
        started, n_rows = time.process_time(), report["packed_rows"]
        counts = None
        if row_counts(path).exists():
            counts = np.memmap(row_counts(path), "<i8", "r", shape=(n_rows, len(COUNTS)))
        rows = PackedRows(cast("Any", None), open_stream(path), capacity, mapped=counts)
        batches, tokens = GlobalBatches(rows, seed=0, shuffle=True, global_batch_size=1024, micro_batch_size=1), 0
        seen = np.zeros(n_rows, dtype=np.bool_)
        for step in range(batches.steps_per_epoch):
            ids = batches.row_ids(step)
            seen[ids] = True
            tokens += int(rows.tokens_per_row[ids].sum())
        assert seen.all() and tokens == report["packed_tokens"]
        return {
            "documents": count, "rows": n_rows, "fill": report["fill"], "blocks": report.get("blocks", 1),
            "pack_seconds": round(packed, 1), "peak_mib": peak_mib,
            "epoch_seconds": round(time.process_time() - started, 1), "epoch_anonymous_mib": peak("RssAnon") >> 20,
            "rows_mib": path.stat().st_size >> 20,
        }  # fmt: skip


def in_child(part: str, count: int, capacity: int) -> dict[str, Any]:
    """What a part gives in a process of its own."""
    command = [sys.executable, "-m", "tools.bench_pack", part, f"--items={count}", f"--capacity={capacity}"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return cast("dict[str, Any]", json.loads(found.stdout))


def memory(count: int) -> list[dict[str, Any]]:
    """`measure_memory` in a process of its own for 4k and 32k."""
    return [in_child("memory-of", count, capacity) for capacity in (4096, 32768)]


def failures(report: dict[str, Any]) -> list[str]:
    """What breaks a bound."""
    broken = []
    for record in report.get("packing", []):
        mine = record["tuner"]
        if mine["efficiency"] < EFFICIENCY or mine["seconds"] > SECONDS:
            broken.append(f"packing {record['set']} at {record['capacity']}: {mine}")
    for record in report.get("memory", []):
        if record["peak_mib"] > PEAK_MIB:
            broken.append(f"memory at {record['capacity']}: {record['peak_mib']} MiB")
    for record in report.get("scale", []):
        if record["peak_mib"] > SCALE_MIB or record["fill"] < SCALE_FILL:
            broken.append(f"scale: {record}")
    return broken


def show(report: dict[str, Any]) -> None:
    """The report as tables on stderr."""
    for part, records in report.items():
        print(f"\n{part}", file=sys.stderr)
        for record in records:
            cells = []
            for key, value in record.items():
                text = " ".join(f"{k} {v:,.6g}" for k, v in value.items()) if isinstance(value, dict) else value
                cells.append(f"{key} {text:,}" if isinstance(text, int) else f"{key} {text}")
            print("  " + " | ".join(cells), file=sys.stderr)


def main() -> int:
    parts = ("packing", "planner", "memory")
    places = {"parts": ([], "packing, planner, memory (the default), scale")}
    arguments = asked(
        __doc__, places, items=(int, "documents; default 1,000,000 (memory: 5,000,000)"), rounds=3,
        out=(Path, "write the JSON object here, too"), no_peer=(False, "leave TRL out"),
        capacity=(CAPACITIES[0], argparse.SUPPRESS),
    )
    for part, measure in (("memory-of", measure_memory), ("scale-of", measure_scale)):
        if arguments.parts == [part]:
            print(json.dumps(measure(arguments.items, arguments.capacity)))
            return 0
    if unknown := set(arguments.parts) - {*parts, "scale"}:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}")
    wanted, items = arguments.parts or parts, arguments.items or 1_000_000
    report: dict[str, Any] = {}
    if "packing" in wanted:
        report["packing"] = packing(items, arguments.rounds, None if arguments.no_peer else trl_packer())
    if "planner" in wanted:
        report["planner"] = planner(min(items, 200_000))
    if "memory" in wanted:
        report["memory"] = memory(arguments.items or MEMORY_DOCUMENTS)
    if "scale" in wanted:
        counts = SCALE_DOCUMENTS if arguments.items is None else (arguments.items,)
        report["scale"] = [in_child("scale-of", count, CAPACITIES[0]) for count in counts]
    show(report)
    print(json.dumps(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    for line in (broken := failures(report)):
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
