"""However many processes, micro-batches and pairs to a row: the same loss of answers, gradients and divergence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.multi.launcher import run_cases
from tests.multi.test_parity import ADAPTERS
from tests.train.synthetic import write_model

METHODS: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "loss": {"sppo": 0.8, "ipo": 0.2}, "sft_weight": 0.4},
    "orpo": {"kind": "orpo", "beta": 0.5}, "simpo": {"kind": "simpo"}, "kto": {"kind": "kto", "desirable_weight": 1.3},
}
PACKED = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12, 13], [14, 15]]
ALONE = [[2 * i, 2 * i + 1] for i in (3, 0, 7, 5, 2, 1, 6, 4)]
ONE: dict[str, Any] = {
    "answers": True, "world": 1, "local": 1, "adapter": "full", "shard": "none", "double": True, "rows": PACKED,
    "micro": 1, "methods": METHODS,
}  # fmt: skip
TWO: dict[str, Any] = {"world": 2, "local": 2}
CASES: dict[str, dict[str, Any]] = {
    "one": {}, "two, 4 micro-batches of which one has no row": {**TWO, "micro": 4},
    "two, a pair to a row": {**TWO, "rows": ALONE, "micro": 2}, "four": {"world": 4, "local": 4, "micro": 1},
    "float32: one": {"double": False}, "float32: two, sharded": {**TWO, "double": False, "shard": "full", "micro": 2},
}
if "TUNER_TEST_EVERY_ROW" not in os.environ:
    del CASES["four"]  # a larger number of replicas, which `make campaign` takes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all cases gave; the worker that runs them is started once."""
    directory = tmp_path_factory.mktemp("answers")
    write_model(directory)
    cases = [{**ONE, **case, "name": name, "model": str(directory)} for name, case in CASES.items()]
    cases = [{**case, "adapter": ADAPTERS[case["adapter"]]} for case in cases]
    run_cases(cases, directory)
    return directory


def read(found: Path, case: str, method: str) -> tuple[dict[str, Any], torch.Tensor]:
    tensors = load_file(found / f"{case}, {method}.safetensors")
    return json.loads((found / f"{case}, {method}.json").read_text()), torch.cat(
        [tensors[name].flatten() for name in sorted(tensors)]
    )


@pytest.mark.multi
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("one")])
def test_losses_figures_and_gradients_are_those_of_one_process(found: Path, case: str) -> None:
    group = case.partition(": ")[0] if ": " in case else ""
    one = f"{group}: one" if group else "one"
    for method in METHODS:
        (facts, gradient), (wanted, expected) = read(found, case, method), read(found, one, method)
        bound = 1e-6 if group == "float32" else 1e-9
        assert facts["loss"] == pytest.approx(wanted["loss"], rel=bound), method
        assert facts["figures"] == pytest.approx(wanted["figures"], rel=bound * 10, abs=bound), method
        assert expected.norm() > 1e-3
        assert (gradient - expected).norm() <= bound * expected.norm(), method


@pytest.mark.multi
def test_the_divergence_is_one_collective_more(found: Path) -> None:
    counts = {name: read(found, "two, a pair to a row", name)[0]["collectives"]["allreduce"] for name in METHODS}
    assert counts["kto"] == counts["dpo"] + 1 == counts["orpo"] + 1
    assert read(found, "one", "kto")[0]["figures"]["kl"] > 0.1
