"""Every optimizer on two FSDP2 processes takes the steps that it takes on one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.processes import run_ranks
from tests.multi.optimizer_steps import OPTIMIZERS, trained
from tests.train.synthetic import write_model
from tuner.runtime.dist import RankInfo

State = dict[str, torch.Tensor]
Both = dict[tuple[str, bool], tuple[State, State]]
"""By the optimizer and whether its gradients are drawn, what one process has and what two have."""

DRAWN = [(kind, True) for kind in OPTIMIZERS]
OF_THE_MODEL = [(kind, False) for kind in OPTIMIZERS]
QUICK = [*DRAWN, ("adamw", False)]
REST = [case for case in OF_THE_MODEL if case not in QUICK]


def of_one_and_two(cases: list[tuple[str, bool]], directory: Path) -> Both:
    """Have one process take the steps, and a group of two processes all of them."""
    write_model(directory)
    one = {case: trained(directory, *case, RankInfo()) for case in cases}

    def work(rank: int) -> None:
        for kind, drawn in cases:
            state = trained(directory, kind, drawn, RankInfo(rank, 2, rank, 2))
            if rank == 0:
                contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
                save_file(contiguous, directory / f"{kind} {drawn}.safetensors")

    assert run_ranks(2, directory, work) == [0, 0]
    return {case: (one[case], load_file(directory / "{} {}.safetensors".format(*case))) for case in cases}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return of_one_and_two(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return of_one_and_two(REST, tmp_path_factory.mktemp("rest"))


def compare(kind: str, drawn: bool, both: Both) -> None:
    one, two = both[kind, drawn]
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
@pytest.mark.parametrize(("kind", "drawn"), QUICK)
def test_two_processes_take_the_steps_of_one(kind: str, drawn: bool, quick: Both) -> None:
    compare(kind, drawn, quick)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(("kind", "drawn"), REST)
def test_so_they_do_with_the_gradients_of_a_model(kind: str, drawn: bool, rest: Both) -> None:
    compare(kind, drawn, rest)


@pytest.mark.multi
@pytest.mark.parametrize("processes", [1, 2])
def test_an_update_on_the_host_has_the_bits_of_one_on_the_device(processes: int, quick: Both) -> None:
    host, device = (quick[kind, True][processes - 1] for kind in ("adamw-host", "adamw"))
    assert host.keys() == device.keys()
    assert all(torch.equal(host[name], device[name]) for name in device)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("processes", [1, 2])
def test_so_it_has_with_the_gradients_of_a_model(processes: int, quick: Both, rest: Both) -> None:
    host, device = rest["adamw-host", False][processes - 1], quick["adamw", False][processes - 1]
    assert host.keys() == device.keys()
    assert all(torch.equal(host[name], device[name]) for name in device)


@pytest.mark.multi
def test_optimizers_differ(quick: Both) -> None:
    weights = [two["model.layers.0.mlp.up_proj.weight"] for (kind, _), (_, two) in quick.items() if "host" not in kind]
    assert all(not torch.equal(a, b) for number, a in enumerate(weights) for b in weights[:number])
