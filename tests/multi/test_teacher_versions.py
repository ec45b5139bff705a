"""A newer teacher on two FSDP2 processes: the steps of one process before and after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import lines
from tests.multi.launcher import run_cases
from tests.run.test_teacher_versions import publish
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer

CASES = {"one": (1, "none"), "two": (2, "full")}


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_learn_from_the_same_versions(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 1, layers=1)
    load_tokenizer(str(tmp_path / "model"), None, TokenizerSection(name_or_path="byte")).save(tmp_path / "model")
    flags = {
        "method.kind": "distill", "method.teacher": str(tmp_path / "teacher"), "method.teacher_every": "3 steps",
        "adapter.dropout": "0", "optimizer.lr": "1e-2", "parallel.processes": "auto", "train.micro_batch_size": "2",
    }  # fmt: skip
    for version, duration in ((10, "2 steps"), (20, "5 steps")):
        publish(tmp_path, version)
        cases = [
            {"world": world, "local": world, "recipe": str(tmp_path / "r.yaml"), "name": f"{name}-{version}",
             "flags": {**flags, "parallel.shard": shard, "train.stop_after": duration, "name": name}}
            for name, (world, shard) in CASES.items()
        ]  # fmt: skip
        run_cases(cases, tmp_path)
    one, two = (lines(tmp_path / "runs" / name) for name in CASES)
    assert [line["step"] for line in one if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7]
    for a, b in zip(one, two, strict=True):
        for figure in ("loss", "teacher_ce", "grad_norm"):
            assert b[figure] == pytest.approx(a[figure], rel=1e-5), figure
    first, *_, last = (line["teacher_ce"] for line in one)
    assert abs(first - last) > 1e-3
