"""One process, two FSDP2 processes and four microbatches of accumulation take the same steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.multi.launcher import run
from tests.train.synthetic import SyntheticRows, write_model
from tuner.data.batches import GlobalBatches

WORKER = str(Path(__file__).with_name("parity_worker.py"))
# 1 : 20 trained tokens in the first global batch; in the second the first of two ranks has none; the third is partial.
TRAINED = [1, 20, 3, 15, 0, 0, 20, 7, 5, 2]
ADAPTERS: dict[str, dict[str, Any]] = {"full": {"kind": "none"}, "lora": {"kind": "lora", "r": 4}}


def steps(model: Path, adapter: str, world_size: int, **options: Any) -> dict[str, list[float]]:
    asked = {
        "model": str(model),
        "adapter": ADAPTERS[adapter],
        "precision": "fp32",
        "global": 4,
        "micro": 4,
        "steps": 20,
        "trained": TRAINED,
    }
    found: dict[str, list[float]] = json.loads(run([WORKER, json.dumps({**asked, **options})], world_size))
    return found


def largest_relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.multi
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_one_process_two_processes_and_accumulation_agree(adapter: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    one = steps(tmp_path, adapter, 1)
    assert one["loss"][0] != one["loss"][-1], "the weights must have moved"
    for other in (steps(tmp_path, adapter, 2, micro=2), steps(tmp_path, adapter, 1, micro=1)):
        assert largest_relative(one["loss"], other["loss"]) <= 1e-5
        assert largest_relative(one["grad_norm"], other["grad_norm"]) <= 1e-5


@pytest.mark.multi
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_bf16_means_the_same_at_step_0(adapter: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    one = steps(tmp_path, adapter, 1, precision="bf16", steps=1)
    two = steps(tmp_path, adapter, 2, precision="bf16", steps=1, micro=2)
    assert largest_relative(one["loss"], two["loss"]) <= 1e-5
    assert largest_relative(one["grad_norm"], two["grad_norm"]) <= 1e-4


def test_the_rows_leave_one_rank_without_trained_tokens() -> None:
    rows: Any = SyntheticRows(TRAINED)
    shares = [
        GlobalBatches(
            rows, seed=0, shuffle=False, global_batch_size=4, micro_batch_size=2, rank=rank, world_size=2
        ).step(1)
        for rank in range(2)
    ]
    counts = [sum(len(batch.trained_positions) for batch in share.micro) for share in shares]
    assert counts == [0, 27]
