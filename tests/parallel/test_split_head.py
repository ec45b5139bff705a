"""An output layer with its vocabulary over processes is the layer, and a model with it trains, evaluates and
answers as one process; nobody has it whole.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from tests.fixtures import split
from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import Operations, whole
from tests.model.tiny import VOCAB, family_config
from tests.parallel.test_fsdp import Sent
from tuner.evals.scorer import judged
from tuner.model import output_layer
from tuner.model.adapter import LoraSpec
from tuner.model.decode import greedy
from tuner.model.output_layer import ALIGNED, LogitTransform, OutputLayer
from tuner.model.root import CausalLM, position_losses
from tuner.model.trainable import TrainableSpec
from tuner.parallel.fsdp import shard, sync_gradients
from tuner.parallel.mesh import Mesh, MeshSpec
from tuner.parallel.values import materialise
from tuner.parallel.vocabulary import VocabularyParts, split_head
from tuner.runtime.device import traced_for
from tuner.runtime.dist import RankInfo
from tuner.setup.probes import record_probes

LENGTHS = (5, 7)
NEW_IDS = range(45, 55)
"""Rows on both sides of the cut between two processes, which is at 49."""
CPU = torch.device("cpu")


def plain(spec: TrainableSpec | None = None, tied: bool = False) -> CausalLM:
    """The model of one process; its parameters have the same values each time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(family_config("llama", tied), dtype=torch.float32)
    if spec is not None:
        spec.apply(model, 5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return CausalLM(model)


def spread(
    rank: int, processes: int, tensor: int, spec: TrainableSpec | None = None, param_dtype: torch.dtype | None = None
) -> CausalLM:
    """The same model with its head over ``tensor`` processes, and all of it sharded over what is left. Collective."""
    with torch.device("meta"):
        root = plain(spec)
    mesh = Mesh.of(RankInfo(rank, processes, rank, processes), MeshSpec("full", tensor))
    meshes = mesh.device_meshes("cpu")
    assert meshes.tensor is not None
    split_head(root, meshes.tensor)
    if meshes.weights is not None:
        shard(root, meshes, True, param_dtype)
    materialise(root, plain(spec) if rank == 0 else None, CPU)
    return root


def batch(seed: int) -> tuple[Any, ...]:
    """Two documents in a row, and the positions that are trained, as a model takes them."""
    ids = torch.randint(3, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    ids[3] = NEW_IDS[seed % len(NEW_IDS)]
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    positions = torch.tensor([0, 1, 3, 5, 6, 8, 10])
    return ids, places, LENGTHS, positions, ids[positions + 1]


def in_bf16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def columns(func: Any, args: Any, result: Any) -> list[int]:
    """How many columns the matrices have that operations make."""
    tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    return [tensor.shape[-1] for tensor in tensors if tensor.ndim > 1]


def trained(root: CausalLM, seeds: list[list[int]], rank: int, context: Any = nullcontext) -> list[float]:
    """Gradients of micro-batches, of which each data rank has one; the losses of this one's."""
    losses = []
    for number, seeds_of in enumerate(seeds):
        sync_gradients(root, number == len(seeds) - 1)
        with context():
            loss: torch.Tensor = root(*batch(seeds_of[rank]))
        loss.backward()
        losses.append(loss.item())
    for parameter in root.parameters():  # small ones that every process keeps whole where others are rounded
        if root.parts.vocabulary is not None and not isinstance(parameter, DTensor) and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
    return losses


def compare(found: CausalLM, expected: CausalLM, apart: float = 2e-6) -> None:
    """Every gradient of both models."""
    names = {name: p for name, p in expected.named_parameters() if p.grad is not None}
    assert names.keys() == {name for name, p in found.named_parameters() if p.grad is not None}
    for name, parameter in found.named_parameters():
        if parameter.grad is None:
            continue
        wanted, gradient = names[name].grad, whole(parameter.grad)
        assert wanted is not None and gradient.dtype == wanted.dtype
        assert float((gradient - wanted).norm() / wanted.norm()) < apart, name


@pytest.mark.multi
def test_rows_of_new_tokens_on_both_sides_of_a_cut_train_as_in_one_process(tmp_path: Path) -> None:
    spec = TrainableSpec(LoraSpec(4, 8.0, 0.0, "all-linear"), (), NEW_IDS, drawn=True)
    one = plain(spec)
    expected = {seed: trained(one, [[seed]], 0)[0] for seed in (1, 2, 3, 4)}

    def work(rank: int) -> None:
        root = spread(rank, 4, 2, spec)
        found = trained(root, [[1, 2], [3, 4]], rank // 2)
        assert found == pytest.approx([expected[1 + rank // 2], expected[3 + rank // 2]], rel=1e-6)
        compare(root, one)

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.multi
def test_in_bf16_the_gradient_of_the_head_is_float32_and_nobody_has_logits_of_all_tokens(tmp_path: Path) -> None:
    def asked(model: CausalLM) -> None:
        model.eval()
        with torch.no_grad(), in_bf16():
            model(*batch(1), position_losses)
            model(*batch(1), judged)
            greedy(model, [[3, 4, 5], [6]], (), [4, 2], CPU)

    def logits(model: CausalLM) -> torch.Tensor:
        return record_probes(model, [torch.tensor([3, 4, 5])], CPU)["logits"]

    one = plain()
    with Operations(columns) as of_one:
        expected = trained(one, [[1], [2]], 0, in_bf16)
        asked(one)
    expected_logits = logits(one)

    def work(rank: int) -> None:
        root = spread(rank, 4, 2, param_dtype=torch.bfloat16)
        with Operations(columns) as of_four:
            losses = trained(root, [[1, 2]], rank // 2, in_bf16)
        assert losses == pytest.approx([expected[rank // 2]], rel=1e-3)
        compare(root, one, 2e-2)
        found, wanted = (whole(model.model.lm_head.weight.grad) for model in (root, one))
        assert float((found - wanted).norm() / wanted.norm()) < 5e-4  # rounded to bf16 it would be off by 1e-3
        with of_four:
            asked(root)
        # With weights as they are trained.
        torch.testing.assert_close(logits(root), expected_logits, rtol=1e-5, atol=1e-6)
        assert VOCAB in of_one.found and VOCAB not in of_four.found
        assert (49, 48)[rank % 2] in of_four.found

    assert run_ranks(4, tmp_path, work) == [0] * 4


@pytest.mark.multi
def test_evaluation_answers_and_probes_are_those_of_one_process(tmp_path: Path) -> None:
    prompts, limits = [[3, 4, 5, 6], [7, 8], [9]], [9, 5, 12]

    def work(rank: int) -> None:
        one, root = plain().eval(), spread(rank, 2, 2).eval()
        with torch.no_grad():
            for seed, asked in product((1, 2), (position_losses, judged)):
                torch.testing.assert_close(root(*batch(seed), asked), one(*batch(seed), asked), rtol=1e-5, atol=1e-6)
        answers = greedy(root, prompts, (), limits, CPU)
        assert answers == greedy(one, prompts, (), limits, CPU)
        root.layout.takes_documents = one.takes_documents = False  # as for models whose prompts are answered one by one
        assert greedy(root, prompts, (), limits, CPU) == greedy(one, prompts, (), limits, CPU)
        root.layout.takes_documents = one.takes_documents = True
        probes = [torch.tensor(prompt) for prompt in prompts]
        found, expected = (record_probes(model, probes, CPU)["logits"] for model in (root, one))
        assert found.shape == (3, VOCAB)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

    assert run_ranks(2, tmp_path, work) == [0, 0]


@pytest.mark.multi
def test_products_are_shared_out_and_sums_are_what_is_sent(tmp_path: Path) -> None:
    """Of four bytes for each number: a sum of hidden states for the embedding, four for each layer, and one for the
    positions of the output layer, which also gathers three numbers of each."""
    case = split.Split("llama")

    def work(rank: int) -> None:
        (tmp_path / str(rank)).mkdir()
        one = split.whole_model(case, tmp_path / str(rank))
        root = split.split_model(case, case.mesh_of(rank, 2), one, tmp_path / str(rank))
        products, sent = [], Sent()
        for model in (one, root):
            model.train()
            with FlopCounterMode(display=False) as counted, sent:
                model(*batch(1)).backward()
            products.append(counted.get_total_flops())
        assert products[1] / products[0] == pytest.approx(0.5, rel=0.01)
        layers, width, positions = 2, 32, len(batch(1)[3])
        states = 4 * sum(LENGTHS) * width
        assert sent.calls == {"allreduce_": 2 + 4 * layers, "_allgather_base_": 1}
        assert sent.bytes["allreduce_"] == (1 + 4 * layers) * states + 4 * positions * width
        assert sent.bytes["_allgather_base_"] == 4 * 2 * 3 * positions

    assert run_ranks(2, tmp_path, work) == [0, 0]


WIDTH = 6
CAPPED = LogitTransform(0.5, 2.0)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks or more, cut into blocks."""
    monkeypatch.setattr(output_layer, "CHUNK_LOGITS", {"cpu": 24, "cuda": 5 * ALIGNED})
    monkeypatch.setattr(output_layer, "BLOCK_LOGITS", {"cpu": 10, "cuda": 10})
    monkeypatch.setattr(output_layer, "BLOCK_VOCABULARY", {"cpu": 2, "cuda": 2})


def layers(vocabulary: int, transform: LogitTransform, biased: bool, scaled: bool) -> tuple[OutputLayer, OutputLayer]:
    """The layer whole on this process, and in parts; both the same everywhere. Collective."""
    generator = torch.Generator().manual_seed(vocabulary)
    made = [
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((vocabulary, WIDTH), (vocabulary,))
    ]
    scale = torch.tensor(8.0, dtype=torch.float64) if scaled else None
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = [one.clone().requires_grad_() for one in made]
    parts = [distribute_tensor(one.clone(), mesh, [Shard(0)], src_data_rank=None).requires_grad_() for one in made]
    split = VocabularyParts(mesh, vocabulary)
    return (
        OutputLayer(whole[0], whole[1] if biased else None, transform, scale=scale),
        OutputLayer(parts[0], parts[1] if biased else None, transform, split.kernel, scale, split),
    )


def weighted(layer: OutputLayer, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 2.0, len(targets), dtype=torch.float64)
    return 3 * layer.cross_entropy(hidden, targets, weights) + layer.cross_entropy(hidden, targets)


def of_documents(layer: OutputLayer, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """In it no position's share is known before all losses are."""
    found = layer.losses(hidden, targets)
    return sum(((part.sum() / 5) ** 2 for part in found.split(5)), start=found.sum())


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def compare_layers(pair: tuple[OutputLayer, OutputLayer], count: int, trained: bool) -> None:
    """Every loss, with its gradients, of both layers; bits of what all processes have of it."""
    generator = torch.Generator().manual_seed(count)
    states = 2 * torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, len(pair[0].weight), (count,), generator=generator)
    for loss in (weighted, of_documents):
        found = []
        for layer in pair:
            hidden, own = (
                states.clone().requires_grad_(), [one for one in (layer.weight, layer.bias) if one is not None]
            )
            for tensor in own:
                tensor.requires_grad_(trained)
            value = loss(layer, hidden, targets)
            gradients = torch.autograd.grad(value, [hidden, *(own if trained else [])])
            with torch.no_grad():
                assert torch.equal(loss(layer, hidden, targets), value)
            found.append([value.detach(), *map(whole, gradients)])
        same(found[1], found[0])
        bits = [torch.empty_like(found[1][1]) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(bits, found[1][1].contiguous())
        assert all(torch.equal(each, bits[0]) for each in bits)
    one, parts = pair[1], pair[1].parts
    assert isinstance(parts, VocabularyParts)
    torch.testing.assert_close(judged(states, one, targets), judged(states, pair[0], targets), rtol=1e-5, atol=1e-5)
    plain = states @ pair[0].weight.detach().T
    plain = plain if pair[0].bias is None else plain + pair[0].bias.detach()
    same(parts.products(one, states), plain)
    pair[0].transform.apply_(plain)
    assert torch.equal(parts.likeliest(one, states), plain.argmax(-1))


@pytest.mark.slow("4-cpu-5")
@pytest.mark.multi
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("processes", "kind", "vocabulary"), [(2, "cpu", 11), (2, "cuda", 11), (4, "cpu", 5)])
def test_losses_gradients_and_choices_are_those_of_one_process(
    processes: int, kind: str, vocabulary: int, tmp_path: Path
) -> None:
    """Rows that do not divide, and of four processes one without any; as on a GPU, with rows of logits filled up."""
    kinds = (
        (LogitTransform(), True, False, True, 13), (CAPPED, False, True, True, 13), (CAPPED, True, False, False, 13),
        (LogitTransform(), False, True, False, 0),
    )

    def work(rank: int) -> None:
        with traced_for(kind):
            for transform, biased, scaled, trained, count in kinds:
                compare_layers(layers(vocabulary, transform, biased, scaled), count, trained)

    assert run_ranks(processes, tmp_path, work) == [0] * processes


@pytest.mark.multi
def test_of_equal_logits_the_first_token_is_chosen_as_in_one_process(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        rows = torch.tensor([[1.0], [3.0], [2.0], [3.0], [3.0]])
        weight = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None)
        layer, hidden = OutputLayer(weight, parts=VocabularyParts(mesh, 5)), torch.tensor([[1.0], [-1.0], [0.0]])
        assert layer.parts is not None
        assert layer.parts.likeliest(layer, hidden).tolist() == [1, 0, 0]
        assert judged(hidden, layer, torch.tensor([3, 0, 4]))[:, 1].tolist() == [0, 1, 0]

    assert run_ranks(2, tmp_path, work) == [0, 0]
