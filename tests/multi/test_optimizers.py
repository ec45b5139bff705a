"""Every optimizer on two FSDP2 processes takes the steps that it takes on one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multi import optimizer_worker
from tests.multi.launcher import run
from tests.train.synthetic import write_model
from tuner.runtime.launch import Launch

WORKER = str(Path(__file__).with_name("optimizer_worker.py"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    model = tmp_path_factory.mktemp("model")
    write_model(model)
    (model / "rows.jsonl").touch()
    run([WORKER, str(model), str(model / "two.pt")], 2)
    one = optimizer_worker.all_trained(model, Launch())
    return one, torch.load(model / "two.pt", weights_only=True)


@pytest.mark.multi
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("kind", optimizer_worker.OPTIMIZERS)
def test_two_processes_take_the_steps_of_one(
    kind: str, drawn: bool, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    one, two = both[0][f"{kind} {drawn}"], both[1][f"{kind} {drawn}"]
    assert one.keys() == two.keys()
    assert any(name.startswith("optimizer/") for name in one)
    for name, expected in one.items():
        assert two[name].shape == expected.shape, name
        # Muon rounds to bf16, which makes a last digit of a gradient one of the eighth bit in the update.
        bound = 3e-4 if kind == "muon" and not drawn and name != "loss" else 1e-5
        difference = torch.linalg.vector_norm(two[name] - expected) / torch.linalg.vector_norm(expected)
        assert difference <= bound, (name, difference)


@pytest.mark.multi
def test_optimizers_differ(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    weights = [found["model.layers.0.mlp.up_proj.weight"] for found in both[1].values()]
    assert all(not torch.equal(a, b) for number, a in enumerate(weights) for b in weights[:number])
