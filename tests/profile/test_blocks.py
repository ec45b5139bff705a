"""Blocks of memory over a stretch of work: what the allocators told, by hand and against torch's own tracker."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile

from tuner.profile.recorder import AllocatedBlock, Holding, MemoryRecord, Owned, RecordedChange, alike, memory_record

RECORD = MemoryRecord(
    [
        AllocatedBlock(100, "parameters", "a.weight", -1),
        AllocatedBlock(30, "activations", "a", 0, 3),
        AllocatedBlock(50, "other", "b", 1, 2),
        AllocatedBlock(20, "gradients", "a.weight", 4, 5),
    ],
    [
        RecordedChange(0.5, "forward", "a"), RecordedChange(1.0, "forward", "b"), RecordedChange(1.5, "forward", "b"),
        RecordedChange(2.0, "backward", "a"), RecordedChange(2.5, "backward", "a"),
        RecordedChange(3.0, "optimizer", ""),
    ],
)  # fmt: skip


def test_totals_parts_and_phases() -> None:
    assert RECORD.totals() == [100, 130, 180, 130, 100, 120, 100]
    assert RECORD.peak_at() == 1
    assert {part: size for part, size in RECORD.parts(1).items() if size} == {
        "parameters": 100, "activations": 30, "other": 50,
    }  # fmt: skip
    assert RECORD.phase_peaks() == {"forward": 180, "backward": 130, "optimizer": 120}
    assert RECORD.turns() == [("forward", 0.5), ("backward", 2.0), ("optimizer", 3.0)]
    assert [RECORD.crossing(limit) for limit in (99, 100, 130, 180)] == [-1, 0, 1, None]
    assert RECORD.owners(1)[:2] == [Holding("a.weight", "parameters", 100), Holding("b", "other", 50)]


@pytest.mark.parametrize("points", [2, 3, 100])
def test_a_thinned_timeline_keeps_the_peak_and_both_ends(points: int) -> None:
    seconds, series = RECORD.timeline(points)
    totals = [sum(sizes) for sizes in zip(*series.values(), strict=True)]
    assert max(totals) == 180 and (totals[0], totals[-1]) == (100, 100)
    assert seconds == sorted(seconds) and len(seconds) == len(totals) <= points + 2
    assert set(series) == {"parameters", "gradients", "activations", "other"}


def test_layers_that_are_alike_are_taken_together() -> None:
    found = alike([
        Holding("model.layers.0.mlp", "activations", 5), Holding("model.layers.11.mlp", "activations", 7),
        Holding("model.layers.0.mlp", "other", 1), Holding("h.3", "other", 2), Holding("", "other", 4),
    ])  # fmt: skip
    assert found == [
        ("model.layers.*.mlp (2 of them)", "activations", 12), ("outside of modules", "other", 4), ("h.*", "other", 2),
        ("model.layers.*.mlp", "other", 1),
    ]  # fmt: skip


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 10, bias=False))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.filterwarnings("ignore")
def test_peak_equals_torchs_tracker() -> None:
    x = torch.randn(32, 64)
    model, optimizer = network()
    weights = dict(model.named_parameters())
    before = [Owned(p.untyped_storage().data_ptr(), p.nbytes, "parameters", name) for name, p in weights.items()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    record = memory_record(told, "cpu", before, [])
    model, optimizer = network()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    # The gradient of the sum, made whole within the product that needs it so, is nothing that the tracker sees.
    within = 32 * 10 * 4
    assert max(record.totals()) == tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] + within
    assert record.parts(-1)["parameters"] == sum(p.nbytes for p in model.parameters())


def test_what_was_there_before_may_end_and_what_failed_ends_where_it_took_last() -> None:
    kept = torch.zeros(1000)
    address, size = kept.untyped_storage().data_ptr(), kept.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        fresh = [torch.zeros(500) for _ in range(3)]
        del fresh
    before = [Owned(address, size, "parameters", "w")]
    assert memory_record(told, "cpu", before, []).totals()[-1] == 4000
    failed = memory_record(told, "cpu", before, [], failed=True)
    assert failed.totals() == [4000, 6000, 8000, 10000]
