"""Measures a step over packed rows against the same documents one to a row, for families of models; alternating.

    python -m tools.bench_routes [--only gpt_oss bloom] [--rounds 8] [--out figures.json]

Each family has a shape of a few million parameters with random weights. Documents are as long as answers in chats are
(median 120 tokens, one in twenty above 500, at most 1,024); a step has as many as fill two rows of 1,024 tokens. Both
sides are built as `tuner train` builds them, with its defaults for this machine, and take the same documents in turns,
in one process: two packed rows, or a document to a micro-batch (`data.packing: false`). Printed are the medians of the
rounds after the first two, how the documents go through the model, and how often faster packed rows are; where packed
rows are refused, the reason. One JSON object goes to stdout.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from tools.causal_cases import quiet
from tools.causal_training import Mode, Training
from tools.commands import asked, some, workplace
from tools.tables import beside
from tuner.data.batches import Batch, StepBatches, collate
from tuner.data.prepared import Row
from tuner.errors import RecipeError
from tuner.train.step import optimizer_step

ROW, ROWS, WARM_UP = 1024, 2, 2
VOCAB = 8192
SHAPES: dict[str, dict[str, Any]] = beside(__file__)["shapes"]
KEYS = {
    "model.init": "random", "data.max_length": ROW, "train.precision": "auto", "optimizer.lr": 1e-5,
    "train.global_batch_size": 2,
}  # fmt: skip


def documents(seed: int) -> list[np.ndarray]:
    """Documents of random ids that fill two rows and no more, in order."""
    generator, found, rooms = np.random.default_rng(seed), [], [ROW] * ROWS
    while True:
        length = int(np.clip(generator.lognormal(np.log(120), 0.9), 16, ROW))
        fits = [i for i, room in enumerate(rooms) if room >= length]
        if not fits:
            return found
        rooms[fits[0]] -= length
        found.append(generator.integers(3, VOCAB, length, dtype=np.int64))


def packed(given: Sequence[np.ndarray]) -> list[Batch]:
    """The documents in rows, each in the first that has room; a row to a micro-batch."""
    rows: list[list[np.ndarray]] = [[] for _ in range(ROWS)]
    for ids in given:
        next(row for row in rows if sum(map(len, row)) + len(ids) <= ROW).append(ids)
    return [_batch(row) for row in rows if row]


def _batch(given: Sequence[np.ndarray]) -> Batch:
    ids, lengths = np.concatenate(given), np.array([len(one) for one in given], np.int32)
    return collate([Row(ids, np.ones(len(ids), bool), lengths, np.arange(len(given), dtype=np.int64))])


def timed(training: Training, step: int, micro: list[Batch]) -> tuple[float, float]:
    """Seconds of a step over these micro-batches, and its loss."""
    trained, tokens = sum(len(one.trained_positions) for one in micro), sum(len(one.input_ids) for one in micro)
    batches = StepBatches(np.arange(len(micro)), trained, tokens, micro)
    started = time.perf_counter()
    loss = optimizer_step(training.state, step, batches, 1.0).read().loss
    return time.perf_counter() - started, loss


def measure(name: str, shape: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The figures of one family; both sides have the same weights, so their losses are one."""
    with workplace() as place, quiet():
        AutoConfig.for_model(name, **shape).save_pretrained(place)
        try:
            sides = {layout: Training(place, Mode(layout, keys=KEYS)) for layout in ("packed", "single")}
        except RecipeError as error:
            return {"type": name, "refused": error.message}
        took: dict[str, list[float]] = {side: [] for side in sides}
        losses: dict[str, list[float]] = {side: [] for side in sides}
        counts = []
        for number in range(rounds):
            given = documents(number)
            counts.append(len(given))
            for side, training in sides.items():
                micro = packed(given) if side == "packed" else [_batch([ids]) for ids in given]
                seconds, loss = timed(training, number, micro)
                took[side].append(seconds)
                losses[side].append(loss)
    steps = {side: statistics.median(times[min(WARM_UP, rounds - 1) :]) for side, times in took.items()}
    return {
        "type": name, "route": sides["packed"].route, "parameters": sides["packed"].resolved.n_parameters,
        "documents": statistics.fmean(counts), "packed_s": round(steps["packed"], 4),
        "single_s": round(steps["single"], 4), "ratio": round(steps["single"] / steps["packed"], 2),
        "losses_apart": max(abs(a - b) / b for a, b in zip(losses["packed"], losses["single"], strict=True)),
    }


def main() -> int:
    """Measure the families and print a table and the figures."""
    options = asked(
        __doc__, only=some(SHAPES), rounds=8,
        threads=(int, "threads of a process; by default as many as there are cores"), out=Path,
    )
    if options.threads:
        torch.set_num_threads(options.threads)
    found = []
    for name in options.only:
        found.append(measure(name, SHAPES[name], options.rounds))
        one = found[-1]
        line = one.get("refused") or (
            f"{one['route']:6} {one['packed_s']:8.3f} s packed {one['single_s']:8.3f} s one a row  {one['ratio']:.2f}x"
        )
        print(f"{name:18} {line}", file=sys.stderr, flush=True)
    report = {"threads": torch.get_num_threads(), "families": found}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
