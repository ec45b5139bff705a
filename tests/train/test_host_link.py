"""Copies of the optimizer on the host, on a stand-in for `torch.cuda`: right in whatever order the streams may run."""

import gc
from typing import Any

import pytest
import torch

from tests.fixtures import tables
from tests.fixtures.cuda_stub import WAYS, LazyCuda, lazy_cuda
from tests.fixtures.cuda_stub import LazyStream as Stream
from tuner.config.optimizers import AdamwOptimizer
from tuner.train import optimizer as optimizer_module
from tuner.train.host_adamw import HostAdamW, HostLink

SIZES, BUCKET, STEPS = (70, 16, 33, 5), 32, 3
Weights = list[torch.Tensor]


def gradient(step: int, number: int) -> torch.Tensor:
    return torch.randn(SIZES[number], generator=torch.Generator().manual_seed(10 * step + number))


def started() -> Weights:
    return [torch.nn.Parameter(gradient(99, number)) for number in range(len(SIZES))]


def expected() -> list[Weights]:
    """The weights after each step of torch's fused AdamW."""
    weights, found = started(), []
    optimizer = torch.optim.AdamW(weights, lr=0.1, betas=(0.9, 0.95), weight_decay=0.2, fused=True)
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            weight.grad = gradient(step, number)
        optimizer.step()
        found.append([weight.detach().clone() for weight in weights])
    return found


@torch.no_grad()
def trained(cuda: LazyCuda) -> list[Weights]:
    """The weights that each step's successor reads on the device, where gradients are made and dropped, too."""
    weights, seen = started(), list[Weights]()
    groups = [{"params": weights, "lr": 0.1, "weight_decay": 0.2}]
    optimizer = HostAdamW(groups, (0.9, 0.95), 1e-8, BUCKET)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)

    def backward(step: int) -> None:
        for number, weight in enumerate(weights):
            assert weight.grad is not None
            weight.grad.copy_(gradient(step, number))

    def forward_again() -> None:
        seen.append([weight.detach().clone() for weight in weights])
        for weight in weights:
            assert weight.grad is not None
            weight.grad.fill_(torch.nan)  # its memory is something else's

    for step in range(STEPS):
        cuda.current.add(lambda step=step: backward(step))  # type: ignore[misc]
        optimizer.step()
        cuda.current.add(forward_again)
    cuda.finish()
    return seen


def is_right(way: str) -> bool:
    with lazy_cuda(way) as cuda:
        found = trained(cuda)
    pairs = zip(found, expected(), strict=True)
    return all(torch.equal(a, b) for ours, torchs in pairs for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_every_order_that_streams_may_take_gives_the_same_bits(way: str) -> None:
    assert is_right(way)


def nothing(*args: Any) -> None:
    pass


@pytest.mark.parametrize("missing", tables.cases(__file__, "each_wait_is_needed"))
def test_each_wait_is_needed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = missing.partition(":")[0]
    monkeypatch.setattr(Stream if name == "wait_event" else HostLink, name, nothing)
    assert not all(map(is_right, WAYS))


def test_a_bucket_is_updated_while_others_are_copied() -> None:
    """Before the host waits for a bucket, those after it are on their way, as many as there are buffers for."""
    with lazy_cuda("late") as cuda:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(200))], "lr": 0.1, "weight_decay": 0.0}]
        optimizer, ahead = HostAdamW(groups, (0.9, 0.95), 1e-8, 16), list[int]()
        wait = HostLink.wait

        def waited(link: HostLink, slot: Any) -> None:
            ahead.append(sum(slot.fetched is not None for slot in link.slots))
            down = slot.fetched.stream
            assert down.done < len(down.queue)
            wait(link, slot)
            assert down.done < len(down.queue) or len(ahead) > 12, "copies are left for the time of the update"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostLink, "wait", waited)
            groups[0]["params"][0].grad = torch.ones(200)  # type: ignore[attr-defined]
            optimizer.step()
        assert len(ahead) == 13 and ahead[0] == 3
        cuda.finish()


def test_page_locked_memory_is_bounded_and_given_back() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(4000))], "lr": 0.1, "weight_decay": 0.0}]
    with lazy_cuda("late"):
        optimizer, locked = HostAdamW(groups, (0.9, 0.95), 1e-8, 64), torch.cuda.cudart().locked
        assert optimizer.problem is None and sum(locked.values()) == 3 * 2 * 64 * 4
        del optimizer
        gc.collect()
        assert not locked


def test_a_system_that_refuses_to_page_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(optimizer_module, "pass_on", said.append)
    section = AdamwOptimizer(lr=0.1, offload="host")
    with lazy_cuda("early", refuse=801):
        optimizer_module.build_optimizer(section, {"one.weight": torch.nn.Parameter(torch.zeros(4, 16))})
    (text,) = said
    assert text.startswith("CUDA cannot page-lock 256 bytes of host memory (error 801): the optimizer's copies wait")
