"""Answers to samples gather a sharded model once, and leave it as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import Operations
from tests.model.test_decode import CPU, PROMPTS
from tests.parallel.test_fsdp import gradients, loss_of, sharded, tiny_model, whole
from tuner.model.decode import greedy
from tuner.parallel.fsdp import sync_gradients
from tuner.parallel.gathered import gathered, whole_bytes
from tuner.parallel.lookup import lookups

LIMITS = [3, 2, 4]
"""Tokens of each answer."""


def gathers(func: Any, args: Any, result: Any) -> list[Any]:
    """The collectives that gather weights."""
    return [func] if "allgather" in str(func) else []


@pytest.mark.multi
@pytest.mark.parametrize("tokens", [pytest.param(None, marks=pytest.mark.slow), 12])
def test_the_model_is_gathered_once_and_not_for_each_token(tokens: int | None, tmp_path: Path) -> None:
    """With an embedding that is a unit, and with one in which rows are looked up in training."""

    def work(rank: int) -> None:
        plain, root = tiny_model(), sharded(rank, tokens=tokens)
        size = sum(p.numel() * p.element_size() for p in plain.parameters())
        assert (whole_bytes(plain), whole_bytes(root)) == (0, size)
        units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        n_gathers = len(units) + len(lookups(root))
        assert len(lookups(root)) == (tokens is not None)
        kept = (root, root.model.get_output_embeddings())  # for the backward pass, which begins with them
        answers = greedy(plain, PROMPTS, (), LIMITS, CPU)
        with Operations(gathers) as evaluating, torch.no_grad():
            loss_of(root, 5)
        with Operations(gathers) as alone:
            assert greedy(root, PROMPTS, (), LIMITS, CPU) == answers
        assert len(evaluating.found) == n_gathers
        # This model's prompts are decoded one by one.
        assert len(alone.found) == sum(LIMITS) * (n_gathers - len(kept)), "each token gathers embedding and blocks"
        with Operations(gathers) as together, gathered(root):
            assert greedy(root, PROMPTS, (), LIMITS, CPU) == answers
        assert len(together.found) <= n_gathers
        assert all(isinstance(parameter, DTensor) for parameter in root.parameters()), "nothing stays gathered"
        for seed in (0, 1):
            loss_of(plain, seed).backward()
        sync_gradients(root, True)
        loss = loss_of(root, rank)
        freed = [unit for unit in units if unit not in kept]
        assert all(isinstance(next(unit.parameters()), DTensor) for unit in freed), "freed after their forward"
        assert not isinstance(kept[1].weight, DTensor)
        loss.backward()
        for name, gradient in gradients(root).items():
            torch.testing.assert_close(whole(gradient), gradients(plain)[name], rtol=1e-4, atol=1e-5)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_a_model_that_is_whole_is_left_alone() -> None:
    root = tiny_model()
    with gathered(root):
        assert greedy(root, [[5, 9]], (), [3], CPU) == greedy(tiny_model(), [[5, 9]], (), [3], CPU)
