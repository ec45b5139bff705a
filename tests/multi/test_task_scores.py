"""However many processes, shards and replicas: each item is scored once, and the results are the same bits."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import quiz, trainings
from tests.multi.launcher import run_cases

CASES: dict[str, dict[str, Any]] = {
    "one": {"world": 1, "local": 1, "flags": {}},
    "two": {"world": 2, "local": 2, "flags": {"parallel.shard": "full"}},
    "two replicas": {"world": 2, "local": 2, "flags": {"parallel.shard": "none"}},
    "2 x 2": {"world": 4, "local": 2, "flags": {"parallel.shard": "hybrid"}},
}
if "TUNER_TEST_EVERY_ROW" not in os.environ:  # `make campaign` takes shards alone and replicas alone too
    CASES = {name: CASES[name] for name in ("one", "2 x 2")}
FLAGS = {
    "train.duration": "1 step", "checkpoint.at_end": "false", "checkpoint.every": "never", "eval.every": "never",
    "eval.at_end": "false", "train.micro_batch_size": "1", "train.global_batch_size": "4",
    "parallel.processes": "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step for each case, whose tasks are scored before it."""
    directory = tmp_path_factory.mktemp("scores")
    trainings.prepare(directory, 1)
    tasks = quiz.flag(directory / "tasks")
    cases = [
        {**case, "name": name, "recipe": str(directory / "r.yaml"),
         "flags": {**FLAGS, **case["flags"], "eval.tasks": tasks, "name": name.replace(" ", "-")}}
        for name, case in CASES.items()
    ]  # fmt: skip
    run_cases(cases, directory)
    return directory


@pytest.mark.multi
@pytest.mark.parametrize("name", [name for name in CASES if name != "one"])
@pytest.mark.parametrize("task", quiz.TASKS)
def test_the_results_are_those_of_one_process(found: Path, name: str, task: str) -> None:
    one, other = (
        (found / "runs" / case.replace(" ", "-") / "evaluations" / "step-0" / f"{task}.jsonl").read_bytes()
        for case in ("one", name)
    )
    assert one == other
    assert len(one.splitlines()) == 5
