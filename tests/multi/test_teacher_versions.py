"""Newer versions of other models on two FSDP2 processes: the steps of one process before and after they come."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import lines
from tests.multi.launcher import run_cases
from tests.run import test_init_from, test_teacher_versions
from tuner.config.recipe import TokenizerSection
from tuner.data.encoding.tokenizer_files import load_tokenizer

CASES = {"one": (1, "none"), "two": (2, "full")}


def take(directory: Path, flags: dict[str, str], publish: Callable[[Path, int], Any], figures: list[str]) -> list[Path]:
    """Train both for two steps, and for five more once there is a newer version; hold their figures together."""
    trainings.prepare(directory, 1, layers=1)
    load_tokenizer(str(directory / "model"), None, TokenizerSection(name_or_path="byte")).save(directory / "model")
    flags |= {"adapter.dropout": "0", "optimizer.lr": "1e-2", "parallel.processes": "auto", "checkpoint.keep": "9",
              "train.micro_batch_size": "2", "checkpoint.every": "1 step"}  # fmt: skip
    for version, duration in ((10, "2 steps"), (20, "5 steps")):
        publish(directory, version)
        cases = [
            {"world": world, "local": world, "recipe": str(directory / "r.yaml"), "name": f"{name}-{version}",
             "flags": {**flags, "parallel.shard": shard, "train.stop_after": duration, "name": name}}
            for name, (world, shard) in CASES.items()
        ]  # fmt: skip
        run_cases(cases, directory)
    runs = [directory / "runs" / name for name in CASES]
    assert [line["step"] for line in lines(runs[0]) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6, 7]
    for a, b in zip(*map(lines, runs), strict=True):
        for figure in ("loss", "grad_norm", *figures):
            assert b[figure] == pytest.approx(a[figure], rel=1e-5), figure
    return runs


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_learn_from_the_same_versions(tmp_path: Path) -> None:
    kind = {"method.kind": "distill", "method.teacher": str(tmp_path / "teacher"), "method.teacher_every": "3 steps"}
    one, _ = take(tmp_path, kind, test_teacher_versions.publish, ["teacher_ce"])
    first, *_, last = (line["teacher_ce"] for line in lines(one))
    assert abs(first - last) > 1e-3


@pytest.mark.slow
@pytest.mark.multi
def test_one_process_and_two_take_the_same_weights_and_have_their_hashes(tmp_path: Path) -> None:
    """Frozen weights, and embeddings of which a version has the first rows alone."""
    entry = {"path": str(tmp_path / "versions"), "load": ["self_attn", "embed_tokens"], "every": "3 steps"}
    runs = take(tmp_path, {"model.init_from": json.dumps([{**entry, "grow": True}])}, test_init_from.publish_few, [])
    for step, name in ((2, "step-10"), (3, "step-20"), (7, "step-20")):
        one, two = (test_init_from.facts(run, step) for run in runs)
        assert one == two and one[0] == name
