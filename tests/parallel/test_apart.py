"""Documents apart on two processes: each takes as many forwards as the other, and gradients are the whole model's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import BloomConfig

from tests.fixtures.packed import packed_inputs
from tests.fixtures.processes import run_ranks
from tests.model.tiny import TOKENS, VOCAB
from tuner.model.build import ModelSpec, build_model, meta_model, model_config
from tuner.model.root import CausalLM
from tuner.model.row_layout import Route
from tuner.model.trainable import TrainableSpec
from tuner.parallel.assemble import AssemblySpec, assemble
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.parallel.values import materialise
from tuner.runtime.dist import RankInfo

LENGTHS = ((20, 3, 9, 2), (8, 7))
"""Of each process: documents of two forwards in one, of one in the other."""


def taken(root: CausalLM, rank: int) -> float:
    """Forward and backward of a process's documents; the loss."""
    lengths = LENGTHS[rank]
    ids = torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(rank))
    loss = root(document_lengths=lengths, **packed_inputs(ids, lengths))
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("route", ["batch", "calls"])
def test_two_processes_give_the_gradients_of_one(route: Route, tmp_path: Path) -> None:
    BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    model = ModelSpec(str(tmp_path), random_init=True)
    whole = assemble(AssemblySpec(TrainableSpec(), 1, route=route), build_model(model, torch.float32, 1)).train()
    losses = [taken(whole, rank) for rank in range(2)]
    wanted = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}

    def work(rank: int) -> None:
        mesh = Mesh.of(RankInfo(rank, 2, rank, 2), MeshSpec("full"))
        root = assemble(
            AssemblySpec(TrainableSpec(), 1, recompute="full", tokens=64, route=route),
            meta_model(model_config(model), torch.float32), meshes=mesh.device_meshes("cpu"),
            give_values=lambda root: materialise(root, whole if rank == 0 else None, torch.device("cpu")),
        ).train()
        asked: list[tuple[int, int]] = []
        most = root.parts.max_forwards
        asking = lambda own: asked.append((own, most(own))) or asked[-1][1]  # type: ignore[func-returns-value] # noqa: E731
        root.parts = replace(root.parts, max_forwards=asking)
        assert taken(root, rank) == pytest.approx(losses[rank], rel=1e-6)
        forwards = {"batch": (2, 1), "calls": (4, 2)}[route]
        assert asked == [(forwards[rank], forwards[0])]
        for name, parameter in root.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], rtol=1e-5, atol=1e-6)

    assert run_ranks(2, tmp_path, work) == [0, 0]
