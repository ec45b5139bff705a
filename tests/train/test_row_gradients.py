"""Gradients by rows on several processes: each row of the global batch once, wherever it lies, and once in the norm."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fixtures.processes import run_ranks
from tests.parallel.test_lookup import LENGTHS, TOKENS, WIDTH, Scaled, ids_of, module, values
from tuner.model.touched_rows import ByRows, TouchedRows
from tuner.parallel.fsdp import squared_norm, sum_whole_gradients
from tuner.parallel.lookup import spread, sum_over_copies
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo
from tuner.train.row_adamw import RowGradients

NAME, STEPS = "embed.weight", 2


def laid_out(weight: torch.Tensor, mesh: Mesh, rank: int, most: int) -> tuple[nn.Module, TouchedRows]:
    """The embedding, in shards where the mesh has them, and its touched rows."""
    device_mesh = mesh.device_meshes("cpu").weights
    if device_mesh is None:
        embedding = module(Scaled, len(weight), 3)
        embedding.weight.data.copy_(weight)
        touched = TouchedRows(embedding, most)
        vars(embedding)["forward"] = ByRows(touched)
        return nn.ModuleList([embedding]), touched
    with torch.device("meta"):
        embedding = module(Scaled, len(weight), 3)
    touched = TouchedRows(embedding, most)
    assert spread(embedding, device_mesh, TOKENS, touched), "whether it pays or not"
    root = nn.ModuleList([embedding]).to_empty(device="cpu")
    local = device_mesh.size(device_mesh.ndim - 1)
    if own := weight.chunk(local)[rank % local : rank % local + 1]:
        shard = embedding.weight
        assert isinstance(shard, DTensor)
        shard.to_local().detach().copy_(own[0])
    return root, touched


@pytest.mark.multi
@pytest.mark.parametrize(("shape", "way"), [((1, 2), "full"), ((2, 2), "hybrid"), ((1, 2), "none")])
def test_each_row_of_the_global_batch_is_there_once(shape: tuple[int, int], way: str, tmp_path: Path) -> None:
    """Of tables with more rows than a step has tokens, and with fewer, of which no shard pays."""
    size = shape[0] * shape[1]

    def work(rank: int) -> None:
        for rows in (41, 9):
            check(rank, rows)

    def check(rank: int, rows: int) -> None:
        mesh = Mesh.of(RankInfo(rank, size, rank % shape[1], shape[1]), MeshSpec(way))
        weight = values(rows, torch.float32).nan_to_num(0, 0, 0)
        whole = module(Scaled, rows, 3)
        whole.weight.data.copy_(weight)
        root, touched = laid_out(weight, mesh, rank, STEPS * max(LENGTHS[:size]) * size)
        of_step = RowGradients({NAME: touched}, mesh, torch.device("cpu"))
        of_step.begin(ids_of(rank, rows, step).numpy() for step in range(STEPS))
        looked_up = set[int]()
        for step in range(STEPS):
            for other in range(size):
                ids = ids_of(other, rows, step)
                looked_up |= set(ids.flatten().tolist())
                (whole(ids) ** 3).sum().backward()
            (root[0](ids_of(rank, rows, step)) ** 3).sum().backward()
        if way == "none":
            sum_whole_gradients(p for name, p in root.named_parameters() if not of_step.owns(name))
        else:
            sum_over_copies(root)
        of_step.after_backward()
        gradient, wanted = of_step.gradients()[NAME], whole.weight.grad
        assert root[0].weight.grad is None and wanted is not None and touched.rows is not None
        own = [row for row in touched.rows.tolist() if row < touched.count]
        held = range(touched.first, touched.first + touched.count)
        assert [row + touched.first for row in own] == [row for row in sorted(looked_up - {3}) if row in held]
        values_of = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert isinstance(gradient, DTensor) == (way != "none") and values_of.shape == (touched.room, WIDTH)
        expected = wanted[held.start : held.stop][own]
        torch.testing.assert_close(values_of[: len(own)], expected, rtol=1e-6, atol=1e-7)
        assert not values_of[len(own) :].any()
        square = squared_norm([gradient], mesh)
        dist.all_reduce(square)
        torch.testing.assert_close(square, wanted.double().square().sum(), rtol=1e-6, atol=0)

    assert run_ranks(size, tmp_path, work) == [0] * size


@pytest.mark.multi
def test_a_process_whose_backward_pass_does_not_get_there_counts_as_zeros(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = Mesh.of(RankInfo(rank, 2, rank, 2), MeshSpec("none"))
        root, touched = laid_out(torch.ones(7, WIDTH), mesh, rank, 4)
        of_step = RowGradients({NAME: touched}, mesh, torch.device("cpu"))
        ids = torch.tensor([[1, 5]])
        of_step.begin([ids.numpy()])
        if rank:
            root[0](ids).sum().backward()
        of_step.after_backward()
        gradient = of_step.gradients()[NAME]
        torch.testing.assert_close(gradient[:2], torch.full((2, WIDTH), Scaled.embed_scale))

    assert run_ranks(2, tmp_path, work) == [0, 0]
