"""An output layer with its vocabulary over processes is the layer: losses, gradients and choices are those of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.fixtures.processes import run_ranks
from tests.fixtures.tensors import whole
from tuner.evals.scorer import judged
from tuner.model import output_layer
from tuner.model.output_layer import ALIGNED, LogitTransform, OutputLayer
from tuner.parallel.vocabulary import VocabularyParts
from tuner.runtime.device import traced_for

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


def compare(pair: tuple[OutputLayer, OutputLayer], count: int, trained: bool) -> None:
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
                compare(layers(vocabulary, transform, biased, scaled), count, trained)

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
