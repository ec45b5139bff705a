"""Rows that are looked up in shards are those of the whole embedding, to the bit, and so are their gradients' sums."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.fixtures.processes import run_ranks
from tests.parallel.test_fsdp import Sent
from tuner.parallel.gathered import kept_whole
from tuner.parallel.lookup import Lookup, can_be_looked_up, pays, spread, sum_over_copies
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.runtime.dist import RankInfo

WIDTH, TOKENS = 6, 5
LENGTHS = (3, 5, 1, 4)
"""Tokens of each rank."""


class Scaled(nn.Embedding):
    """As Gemma's: a forward of its own around torch's."""

    embed_scale = 0.37

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(self.embed_scale).to(self.weight.dtype)


class Other(nn.Embedding):
    """Its forward may be anything."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[input]


def values(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """With what a sum with zeros would change, or spread."""
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    drawn[2, 0], drawn[3, 1], drawn[4, 2], drawn[5, 3] = -0.0, torch.inf, torch.nan, 1e-42
    return drawn.to(dtype)


def ids_of(rank: int, rows: int, step: int = 0) -> torch.Tensor:
    ids = torch.randint(0, rows, (1, LENGTHS[rank]), generator=torch.Generator().manual_seed(7 * step + rank))
    ids[0, 0] = (rank + step) % 3 + 2  # rows of others', taken by several, and one that counts for nothing
    return ids


def module(kind: type[nn.Embedding], rows: int, padding: int | None = None) -> nn.Embedding:
    return kind(rows, WIDTH, padding_idx=padding)


def in_shards(kind: type[nn.Embedding], weight: torch.Tensor, rank: int, shape: tuple[int, int]) -> nn.Module:
    """The embedding in shards of these values, in a module; ``shape`` is machines and processes of each."""
    machines, local = shape
    laid_out = Mesh.of(RankInfo(rank, machines * local, rank % local, local), MeshSpec("hybrid"))
    mesh = laid_out.device_meshes("cpu").weights
    assert mesh is not None
    with torch.device("meta"):
        embedding = module(kind, len(weight), 3).to(weight.dtype).requires_grad_(weight.dtype == torch.float32)
    found = spread(embedding, mesh, 1 if len(weight) < 20 else TOKENS)
    assert found == {embedding.weight} and isinstance(embedding.weight, DTensor)
    root = nn.ModuleList([embedding]).to_empty(device="cpu")
    own = weight.chunk(local)[rank % local : rank % local + 1]
    if own:
        embedding.weight.to_local().detach().copy_(own[0])
    assert torch.equal(bits(embedding.weight.detach().full_tensor()), bits(weight))
    return root


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.slow("shape1")
@pytest.mark.multi
@pytest.mark.parametrize("shape", [(1, 2), (1, 4), (2, 2)])
def test_rows_are_those_of_the_whole_to_the_bit(shape: tuple[int, int], tmp_path: Path) -> None:
    """Of shards of unequal size, for other numbers of tokens on each process; a scale is its class's own."""
    rows = 41

    def work(rank: int) -> None:
        for kind, dtype in product((nn.Embedding, Scaled), (torch.float32, torch.bfloat16)):
            whole = module(kind, rows, 3).to(dtype)
            whole.weight.data.copy_(values(rows, dtype))
            root = in_shards(kind, whole.weight.data, rank, shape)
            expected = whole(ids := ids_of(rank, rows))
            assert torch.equal(bits(root[0](ids)), bits(expected)), (kind, dtype)
            with torch.no_grad():  # of any length
                many = torch.arange(rows)[rank:]
                assert torch.equal(bits(root[0](many)), bits(whole(many))), (kind, dtype)

    size = shape[0] * shape[1]
    assert run_ranks(size, tmp_path, work) == [0] * size


@pytest.mark.slow("shape1")
@pytest.mark.multi
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_gradients_are_added_up_once_over_processes_micro_batches_and_copies(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    rows, size = 41, shape[0] * shape[1]

    def work(rank: int) -> None:
        weight = values(rows, torch.float32).nan_to_num(0, 0, 0)
        whole = module(Scaled, rows, 3)
        whole.weight.data.copy_(weight)
        root = in_shards(Scaled, weight, rank, shape)
        for step in range(2):
            for other in range(size):
                (whole(ids_of(other, rows, step)) ** 3).sum().backward()
            (root[0](ids_of(rank, rows, step)) ** 3).sum().backward()
        sum_over_copies(root)
        gradient, wanted = root[0].weight.grad, whole.weight.grad
        assert isinstance(gradient, DTensor) and wanted is not None and not wanted[3].any() and wanted[2].any()
        torch.testing.assert_close(gradient.full_tensor(), wanted, rtol=1e-6, atol=1e-7)
        # The same bits each time: the order of sums is that of ranks and tokens.
        twice = gradient.to_local().clone()
        root[0].weight.grad = None
        for step in range(2):
            (root[0](ids_of(rank, rows, step)) ** 3).sum().backward()
        sum_over_copies(root)
        assert torch.equal(bits(root[0].weight.grad.to_local()), bits(twice))

    assert run_ranks(size, tmp_path, work) == [0] * size


@pytest.mark.multi
def test_a_process_may_have_no_rows(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        weight = torch.arange(9.0 * WIDTH).view(9, WIDTH)  # three, three, three and none
        root = in_shards(nn.Embedding, weight, rank, (1, 4))
        found = root[0](torch.tensor([8 - rank]))
        assert torch.equal(found, weight[8 - rank : 9 - rank])
        found.sum().backward()
        counted = [0.0] * 5 + [1.0] * 4
        assert root[0].weight.grad.full_tensor().sum(1).tolist() == [WIDTH * count for count in counted]

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.multi
def test_what_is_sent_and_that_a_kept_whole_weight_sends_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        root = in_shards(nn.Embedding, values(41, torch.float32), rank, (1, 2))
        with Sent() as sent:
            root[0](ids_of(rank, 41)).sum().backward()
        row = 4 * WIDTH
        assert sent.bytes == {"_allgather_base_": 2 * TOKENS * (8 + row), "_reduce_scatter_base_": 2 * TOKENS * row}
        with torch.no_grad(), kept_whole(root), Sent() as sent:
            for _ in range(rank + 1):
                root[0](torch.arange(30))
        assert not sent.calls
        root[0].requires_grad_(False)
        with Sent() as sent:
            assert not root[0](ids_of(rank, 41)).requires_grad
        assert sent.bytes == {"_allgather_base_": 2 * TOKENS * 8, "_reduce_scatter_base_": 2 * TOKENS * row}
        with pytest.raises(ValueError, match="6 tokens .* room for 5"):
            root[0](torch.arange(6))
        dist.barrier()

    assert run_ranks(2, tmp_path, work) == [0, 0]


def test_which_embeddings_are_looked_up() -> None:
    assert pays(80, 8, 5) and not pays(79, 8, 5)
    assert can_be_looked_up(nn.Embedding(8, 4)) and can_be_looked_up(Scaled(8, 4))
    rounded = nn.Embedding(8, 4, dtype=torch.bfloat16)
    assert not can_be_looked_up(rounded), "gradients are added up in float32"
    assert can_be_looked_up(rounded.requires_grad_(False))
    assert not can_be_looked_up(nn.Embedding(8, 3, dtype=torch.bfloat16).requires_grad_(False)), "no whole words"
    assert not can_be_looked_up(Other(8, 4))
    for keys in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        assert not can_be_looked_up(nn.Embedding(8, 4, **keys))  # type: ignore[arg-type]


def test_other_tables_in_a_forward_are_looked_up_as_ever() -> None:
    table = torch.arange(12.0).view(3, 4)

    class Both(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + functional.embedding(input, table)

    embedding = Both(3, 4)
    lookup = object.__new__(Lookup)
    lookup.embedding, lookup.whole = embedding, torch.ones(3, 4)
    assert torch.equal(lookup(torch.tensor([2])), table[2:] + 1)
