"""Runs on answers, from records on: they begin at their reference, and learn."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import trainings
from tests.fixtures.trainings import launch, lines

RECIPE = """\
model: {name_or_path: ./model, kernels: torch}
tokenizer: {name_or_path: byte}
data: {train: rows.jsonl, max_length: 64, cache_dir: cache}
train: {duration: 4 steps, global_batch_size: 4, micro_batch_size: 1, precision: fp32, device: cpu}
optimizer: {lr: 5e-3}
logging: {level: warning}
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = trainings.prepare(tmp_path_factory.mktemp("answers"), 1)
    (directory / "r.yaml").write_text(RECIPE)
    rng = random.Random(1)
    answers = [(f"question {i} ", "ab" * rng.randint(1, 4), "cd" * rng.randint(1, 4)) for i in range(40)]
    pairs = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in answers]
    labels = [
        {"prompt": prompt, "completion": answer, "label": is_good}
        for prompt, good, bad in answers
        for answer, is_good in ((good, True), (bad, False))
    ]
    for name, rows in (("pairs", pairs), ("labels", labels)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def steps(workplace: Path, name: str, rows: str, **flags: str) -> list[dict[str, Any]]:
    result = launch(workplace, name=name, data__train=f"{rows}.jsonl", **flags)
    return [line for line in lines(result.run_dir) if line["kind"] == "train"]


def test_kto_begins_at_its_reference_and_learns_which_answers_are_good(workplace: Path) -> None:
    """Mismatched answers included."""
    found = steps(workplace, "kto", "labels", method__kind="kto", adapter__kind="lora")
    first, last = found[0], found[-1]
    assert first["kl"] == first["reward_desirable"] == first["reward_undesirable"] == 0.0
    assert first["loss"] == 0.5
    assert last["reward_desirable"] > last["reward_undesirable"]


@pytest.mark.slow("simpo", "cpo")
@pytest.mark.parametrize("method", ["orpo", "simpo", "cpo"])
def test_methods_without_a_reference_learn_to_prefer(workplace: Path, method: str) -> None:
    found = steps(workplace, method, "pairs", method__kind=method)
    assert found[-1]["margin"] > found[0]["margin"]
    assert found[-1]["loss"] < found[0]["loss"]


def test_dpo_of_several_losses_logs_each(workplace: Path) -> None:
    flags = {"method__kind": "dpo", "method__loss": "{sigmoid: 0.8, bco: 0.2}", "method__sft_weight": "0.1"}
    found = steps(workplace, "several", "pairs", **flags)
    for line in found:
        assert line["loss"] == pytest.approx(line["sigmoid"] + line["bco"] + line["sft"], rel=1e-6)
    assert found[0]["margin"] == 0.0 < found[-1]["margin"]
