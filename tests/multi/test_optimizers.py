"""Every optimizer on two FSDP2 processes takes the steps that it takes on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.multi import optimizer_worker
from tests.multi.launcher import run
from tests.train.synthetic import write_model
from tuner.runtime.dist import RankInfo

WORKER = str(Path(__file__).with_name("optimizer_worker.py"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    model = tmp_path_factory.mktemp("model")
    write_model(model)
    (model / "rows.jsonl").touch()
    run([WORKER, str(model), str(model / "two.safetensors")], 2)
    two: dict[str, Any] = {}
    for name, tensor in load_file(model / "two.safetensors").items():
        case, _, name_in_case = name.partition("|")
        two.setdefault(case, {})[name_in_case] = tensor
    return optimizer_worker.all_trained(model, RankInfo()), two


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
        scale, bound = torch.linalg.vector_norm(expected), 1e-5
        if kind == "muon" and not drawn and name != "loss":
            # Muon orthogonalizes in bf16, where directions that hardly count are brought to full length with
            # their rounding; with gradients that are drawn, which have none of those, it is held to 1e-5 too.
            start = one.get(f"start/{name}")
            scale, bound = (scale, 1e-3) if start is None else (torch.linalg.vector_norm(expected - start), 0.05)
        difference = torch.linalg.vector_norm(two[name] - expected) / scale
        assert difference <= bound, (name, difference)


@pytest.mark.multi
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_on_the_host_has_the_bits_of_one_on_the_device(
    processes: int, drawn: bool, both: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    found = both[processes - 1]
    host, device = found[f"adamw-host {drawn}"], found[f"adamw {drawn}"]
    assert host.keys() == device.keys()
    assert all(torch.equal(host[name], device[name]) for name in device)


@pytest.mark.multi
def test_optimizers_differ(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found = {case: state for case, state in both[1].items() if "host" not in case}
    weights = [state["model.layers.0.mlp.up_proj.weight"] for state in found.values()]
    assert all(not torch.equal(a, b) for number, a in enumerate(weights) for b in weights[:number])
