"""The log of storages counts every byte: by hand on a small network, and against torch's own tracker."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from tuner.profile.memory import StorageLog, gradient_tensors, model_tensors

CPU = torch.device("cpu")


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 10, bias=False))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, log: StorageLog, x: torch.Tensor) -> None:
    with log.during("activations"):
        loss = model(x).sum()
    loss.backward()
    log.assign(gradient_tensors(model), "gradients")
    optimizer.step()
    log.assign((tensor for state in optimizer.state.values() for tensor in state.values()), "optimizer")
    optimizer.zero_grad()


def test_parts_by_hand() -> None:
    model, optimizer = network()
    weights = sum(p.numel() * 4 for p in model.parameters())
    log = StorageLog(CPU)
    log.assign(model_tensors(model), "weights")
    with log:
        for _ in range(2):
            step(model, optimizer, log, torch.randn(32, 64))
    peak = log.peak()
    assert peak.parts["weights"] == weights
    assert peak.parts["optimizer"] == 2 * weights + 2 * 4
    # Both outputs of width 128 are kept for backward, and the loss; the last layer's output is not.
    assert peak.parts["activations"] == 2 * 32 * 128 * 4 + 4
    assert peak.peak == sum(peak.parts.values())


def test_freed_storages_leave_the_sum() -> None:
    log = StorageLog(CPU)
    with log, log.during("activations"):
        for _ in range(5):
            kept = torch.zeros(1000)
            del kept
        view = torch.zeros(500).view(5, 100)[1]
    assert log.peak().peak == 4000
    assert view.shape == (100,)


@pytest.mark.filterwarnings("ignore")
def test_peak_equals_torchs_tracker() -> None:
    x = torch.randn(32, 64)
    model, optimizer = network()
    log = StorageLog(CPU)
    log.assign(model_tensors(model), "weights")
    with log:
        step(model, optimizer, log, x)
        step(model, optimizer, log, x)
    model, optimizer = network()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    assert log.peak().peak == tracker.get_tracker_snapshot("peak")[CPU]["Total"]
