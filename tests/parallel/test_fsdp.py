"""A model in shards over two processes is the model: its values, its buffers, and the sum of its gradients; weights
gathered in bfloat16 are those that autocast rounds anyway, and a norm does not depend on how gradients are
divided.
"""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import whole
from tests.model.tiny import FAMILIES, VOCAB, family_model, tiny_config
from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.parallel import fsdp
from tuner.parallel.fsdp import rounded_weights, shard, sum_of_squares, sum_whole_gradients
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.parallel.values import materialise
from tuner.runtime.dist import RankInfo
from tuner.runtime.parts import local


def tiny_model() -> CausalLM:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    return CausalLM(AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32))


def sharded(
    rank: int, reshard: bool = True, processes_to_a_copy: int = 2, param_dtype: torch.dtype | None = None,
    tokens: int | None = None, reduce_dtype: torch.dtype | None = None,
) -> CausalLM:
    """The tiny model over two processes, with rank 0's values."""
    with torch.device("meta"):
        root = tiny_model()
    spec = MeshSpec("full" if processes_to_a_copy == 2 else "none")
    meshes = Mesh.of(RankInfo(rank, 2, rank, 2), spec).device_meshes("cpu")
    if meshes.weights is not None:
        shard(root, meshes, reshard, param_dtype, tokens, reduce_dtype=reduce_dtype)
    materialise(root, tiny_model() if rank == 0 else None, torch.device("cpu"))
    return root


class Sent(TorchDispatchMode):
    """Counts calls and bytes of collectives, where they are whole, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func.name()).partition("::")
        if namespace == "c10d":
            whole = max((leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)), key=torch.numel)
            self.calls[name] += 1
            self.bytes[name] += whole.nbytes
        return func(*args, **(kwargs or {}))


def step(root: CausalLM, seed: int) -> None:
    ids = torch.randint(0, VOCAB, (13,), generator=torch.Generator().manual_seed(seed))
    root.train()
    root(ids[:-1], torch.arange(12), (12,), torch.arange(12), ids[1:]).backward()


def loss_of(root: CausalLM, seed: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (13,), generator=torch.Generator().manual_seed(seed))
    logits = root.logits(ids[:-1], torch.arange(12), (12,), torch.arange(12))
    return torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum")


def gradients(root: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in root.named_parameters() if p.grad is not None}


def test_one_process_has_its_tensors_whole() -> None:
    root = tiny_model()
    weight = next(root.parameters())
    assert local(weight) is weight
    fsdp.sync_gradients(root, False)  # nothing to sync, nothing to fail


@pytest.mark.multi
def test_values_and_buffers_are_rank_0s_and_each_process_holds_half(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        root, one = sharded(rank), tiny_model()
        names = dict(one.named_parameters())
        for name, parameter in root.named_parameters():
            assert torch.equal(whole(parameter), names[name]), name
        buffers = dict(one.named_buffers())
        assert buffers
        for name, buffer in root.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        held = sum(local(parameter).numel() for parameter in root.parameters())
        assert held == pytest.approx(sum(p.numel() for p in one.parameters()) / 2, rel=0.05)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
def test_what_is_sent_for_a_micro_batch(tmp_path: Path) -> None:
    """In bf16: layers twice and the output layer once at two bytes, the embedding once and the last norm at four."""

    def work(rank: int) -> None:
        sent = Sent()
        root = sharded(rank, param_dtype=torch.bfloat16)
        with sent, torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            step(root, rank)
        whole = dict(tiny_model().named_parameters())
        layers = sum(p.numel() for name, p in whole.items() if ".layers." in name and p.ndim == 2)
        padded = -(-VOCAB // 2) * 2 * 32  # rows that divide by two
        assert sent.bytes["_allgather_base_"] == 2 * (2 * layers + padded) + 4 * (padded + 32)
        assert sent.calls["_allgather_base_"] == 2 * 2 + 3
        assert sent.bytes["_reduce_scatter_base_"] == 4 * (layers + 2 * padded + 32)
        assert sent.calls["_reduce_scatter_base_"] == 5

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_gradients_reduced_in_bf16_are_half_as_much_to_send(param_dtype: torch.dtype | None, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        found, sent = [], []
        for reduce_dtype in (None, torch.bfloat16):
            root = sharded(rank, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            sent.append(Sent())
            with sent[-1], torch.autocast("cpu", dtype=torch.bfloat16, enabled=param_dtype is not None):
                step(root, rank)
            found.append({name: local(one) for name, one in gradients(root).items()})
        reduced = [one.bytes["_reduce_scatter_base_"] for one in sent]
        head = 0 if param_dtype is None else 4 * -(-VOCAB // 2) * 2 * 32  # is added up over chunks of logits in float32
        assert reduced[0] - head == 2 * (reduced[1] - head)
        assert sent[0].bytes["_allgather_base_"] == sent[1].bytes["_allgather_base_"]
        assert any(not torch.equal(one, found[1][name]) for name, one in found[0].items())
        for name, one in found[0].items():
            assert found[1][name].dtype == torch.float32
            torch.testing.assert_close(found[1][name], one, rtol=2**-6, atol=2**-6 * float(one.abs().max()))

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.parametrize("are_whole", [False, True])
def test_between_micro_batches_a_process_keeps_shards_of_gradients_unless_asked_for_whole_ones(
    are_whole: bool, tmp_path: Path
) -> None:
    def work(rank: int) -> None:
        root, sent = sharded(rank), Sent()
        fsdp.sync_gradients(root, False, are_whole)
        with sent:
            step(root, rank)
        assert sent.calls["_reduce_scatter_base_"] == (0 if are_whole else 5)
        parameters = list(root.parameters())
        assert {parameter.grad is None for parameter in parameters} == {are_whole}
        fsdp.sync_gradients(root, True, are_whole)
        step(root, rank)
        assert all(local(p.grad).shape == local(p).shape for p in parameters if p.grad is not None)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.parametrize("processes_to_a_copy", [1, 2])
def test_gradients_are_summed_over_processes_once_they_are_asked_for(processes_to_a_copy: int, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        one = tiny_model()
        for seed in (0, 1, 10, 11):
            loss_of(one, seed).backward()
        root = sharded(rank, processes_to_a_copy=processes_to_a_copy)
        fsdp.sync_gradients(root, False)
        loss_of(root, rank).backward()
        fsdp.sync_gradients(root, True)
        loss_of(root, 10 + rank).backward()
        sum_whole_gradients(root.parameters())
        expected = gradients(one)
        found = gradients(root)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(whole(gradient), expected[name], rtol=1e-4, atol=1e-5)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
@pytest.mark.parametrize("small", [fsdp.FLAT, 4])
def test_gradients_of_whole_parameters_are_added_up_large_ones_in_place(
    small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "FLAT", small)

    def work(rank: int) -> None:
        both, one = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(3))
        large, unused = torch.nn.Parameter(torch.zeros(5)), [torch.nn.Parameter(torch.ones(n)) for n in (2, 6)]
        large.grad = torch.ones(5) if rank == 0 else None
        both.grad = torch.full((2, 3), 1.0 + rank)
        one.grad = torch.tensor([1.0, 2.0, 3.0]) if rank == 1 else None  # as of an expert that rank 1 alone took
        given = both.grad
        sum_whole_gradients([both, unused[0], one, large, unused[1]])
        assert large.grad is not None and large.grad.tolist() == [1.0] * 5
        assert [parameter.grad for parameter in unused] == [None, None]
        torch.optim.AdamW(unused, weight_decay=0.5).step()
        assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in unused), "none decays"
        assert torch.equal(both.grad, torch.full((2, 3), 3.0))
        assert one.grad is not None and one.grad.tolist() == [1.0, 2.0, 3.0]
        assert (both.grad is given) == (small == 4)
        share = fsdp.squared_norm([both.grad, one.grad], Mesh.of(RankInfo(rank, 2, rank, 2), MeshSpec("none")))
        torch.distributed.all_reduce(share)
        assert share.item() == pytest.approx(6 * 9 + 14)

    assert run_ranks(2, tmp_path, work) == [0, 0]


def loss_and_gradients(root: CausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    root.train()
    ids = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(10), torch.arange(14)])
    positions = torch.arange(23)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = root(ids, places, (10, 14), positions, ids[1:])
    loss.backward()
    return loss.detach(), {name: p.grad.float() for name, p in root.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_before_the_gather_changes_no_bit_of_loss_or_gradient(family: str) -> None:
    plain = CausalLM(family_model(family, tied=False))
    rounded = copy.deepcopy(plain)
    chosen = [weight for block in decoder_blocks(rounded.model) for weight in rounded_weights(block)]
    for weight in chosen:
        weight.data = weight.data.bfloat16()
    assert chosen
    (one, gradients), (other, found) = loss_and_gradients(plain), loss_and_gradients(rounded)
    assert torch.equal(one, other)
    assert gradients.keys() == found.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], found[name])] == []


def test_a_layer_with_something_large_that_autocast_leaves_alone_rounds_nothing() -> None:
    layer = nn.Module()
    layer.product, layer.norm = nn.Linear(8, 8), nn.LayerNorm(fsdp.SMALL, device="meta")
    assert rounded_weights(layer) == {layer.product.weight}
    layer.experts = nn.Parameter(torch.empty(2, fsdp.SMALL // 2 + 1, device="meta"))
    assert rounded_weights(layer) == set()


def test_what_is_not_float32_or_may_do_more_than_multiply_is_not_rounded() -> None:
    class Router(nn.Linear):
        """Its forward may be anything."""

    layer = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16), Router(8, 8), nn.Embedding(8, 8)])
    assert rounded_weights(layer) == set()


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    return torch.randn(24576, 576, generator=torch.Generator().manual_seed(0)) * 1e-3


def test_a_large_tensor_is_added_up_exactly(gradient: torch.Tensor) -> None:
    exact = gradient.double().square().sum()
    assert abs(sum_of_squares([gradient]) / exact - 1) < 1e-7
    assert abs(torch.linalg.vector_norm(gradient).double().square() / exact - 1) > 1e-4, "else torch's norm would do"


def test_shards_add_up_to_the_whole(gradient: torch.Tensor) -> None:
    shards = [sum_of_squares([piece]) for piece in gradient.split(10000)]
    assert abs(sum(shards) / sum_of_squares([gradient]) - 1) < 1e-7


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 5), (4096,), (4097,), (2, 4096), (0, 7)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = 2 * float(tensor.double().square().sum())
    assert float(sum_of_squares([tensor, tensor.clone()])) == pytest.approx(expected, 1e-6)
