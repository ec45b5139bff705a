"""A layer that is computed a second time routes its tokens as it did the first time, whatever moved its scores."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.model.tiny import family_config
from tuner.model.build import ModelSpec, build_model
from tuner.model.replay import noted, replayed
from tuner.model.trainable import TrainableSpec
from tuner.parallel.assemble import AssemblySpec, Recompute, assemble


class Restless(nn.Module):
    """A router whose scores are others each time, and notes what it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)))
        self.chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = tokens @ self.weight + (self.calls == 2) * torch.randn(7, 5)
        values, first = torch.topk(scores, 2, dim=-1)
        columns, second = scores.topk(3, dim=0, sorted=False)
        self.chosen.append((first, second))
        assert torch.equal(values, scores.gather(-1, first)) and torch.equal(columns, scores.gather(0, second))
        return (values * first).sum() + (columns * second).sum() + noted(lambda: float(self.calls))


@pytest.mark.parametrize("replays", [True, False])
def test_the_second_forward_ranks_as_the_first(replays: bool) -> None:
    torch.manual_seed(0)
    router, tokens = Restless(), torch.randn(7, 6, requires_grad=True)
    options: dict[str, Any] = {"context_fn": replayed} if replays else {}
    checkpoint(router, tokens, use_reentrant=False, **options).backward()
    first, second = router.chosen
    assert router.calls == 2
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True)) == replays


def test_what_is_noted_is_made_once_for_both_forwards() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    first, second = replayed()
    with first:
        assert [noted(make), noted(make)] == [0, 1]
    for _ in range(2):  # as often as the graph is differentiated
        with second:
            assert [noted(make), noted(make)] == [0, 1]
    assert noted(make) == 2
    assert made == [0, 1, 2]


@pytest.mark.parametrize("level", ["full", "selective"])
def test_gradients_are_those_of_a_model_that_is_not_recomputed(level: Recompute, tmp_path: Path) -> None:
    family_config("qwen3-moe", tied=False).save_pretrained(tmp_path)
    found = []
    for each in ("none", level):
        spec = AssemblySpec(TrainableSpec(drawn=True), seed=0, recompute=each)
        root = assemble(spec, build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, 1)).train()
        ids = torch.arange(3, 20)
        root(ids, torch.arange(17), (17,), torch.arange(16), ids[1:]).backward()
        found.append([parameter.grad for parameter in root.parameters()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
