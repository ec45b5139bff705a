"""How fast rows are read by random index from prepared data in a bucket, and what moves for them."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.data import tiny
from tests.fixtures.store_servers import BUCKET, serving
from tools.commands import Results, workplace
from tuner.data.building.prepare import PreparedInfo, prepare
from tuner.data.prepared import PackedRows, open_prepared
from tuner.runtime.console import Console
from tuner.stages import stage_of
from tuner.stores.client import Client

RECORDS, MAX_LENGTH, FIRST, READ = 300_000, 2048, 200, 20_000
LEAST = 1000
"""Rows a second, once they are all here."""


def rows_by_index(results: Results) -> int:
    """Cold, the rest of an epoch, opened again and again from memory; the exit code, 1 where one is slow or wrong."""
    moved: list[int] = []
    part = Client.part

    def counted(client: Client, key: str, start: int, length: int) -> bytes | None:
        moved.append(length)
        return part(client, key, start, length)

    def read(name: str, rows: PackedRows, ids: Any) -> int:
        moved.clear()
        started = time.perf_counter()
        for i in ids.tolist():
            rows.row(i)
        speed, size = round(len(ids) / (time.perf_counter() - started)), int(rows.tokens_per_row[ids].mean() * 2)
        each = round(sum(moved) / len(ids))
        results.add({"rows": name, "read": len(ids), "rows_per_s": speed, "bytes_per_row": each, "bytes_of_ids": size})
        return speed

    Client.part = counted  # type: ignore[method-assign]
    with workplace() as place, serving("s3", place) as server:
        os.environ.update(server.environment())
        draw = random.Random(0)
        texts = (" ".join(draw.choices(tiny.CORPUS, k=draw.randint(10, 30))) for _ in range(RECORDS))
        (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        here = open_prepared(prepared(place, "one").path).train
        found = prepared(place, "two")
        away, again = open_prepared(found.path).train, open_prepared(found.path).train
        assert found.cached and not moved
        ids, order = (np.random.default_rng(seed).permutation(len(here)) for seed in range(2))
        read("cold", away, ids[:FIRST])
        read("first epoch", away, order)
        speeds = [read(*each, ids[:READ]) for each in (("opened again", again), ("warm", away), ("built here", here))]
        same = all(np.array_equal(here.row(i).input_ids, again.row(i).input_ids) for i in ids[:FIRST].tolist())
    return int(min(speeds) < LEAST or not same)


def prepared(place: Path, machine: str) -> PreparedInfo:
    """The data on a machine with a stage of its own."""
    os.environ["TUNER_CACHE"] = str(place / machine)
    spec = tiny.request(stage_of(f"s3://{BUCKET}/c"), place / "rows.jsonl", pretrain=True, max_length=MAX_LENGTH)
    return prepare(spec, Console(level="warning"))
