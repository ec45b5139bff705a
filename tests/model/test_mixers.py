"""Recurrent layers in packed rows: each document as a row of a batch, whatever its length, recomputed or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.model.tiny import VOCAB, family_config, family_model
from tuner.errors import RecipeError
from tuner.model import attention, mixers
from tuner.model.blocks import apply_recompute
from tuner.model.mixers import MixerLayout, batches
from tuner.model.root import CausalLM

CPU = torch.device("cpu")


def hybrid() -> PreTrainedModel:
    """Layers with attention and a Mamba mixer side by side."""
    attention.register()
    torch.manual_seed(2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        family_config("falcon-h1", tied=False), dtype=torch.float32, attn_implementation=attention.PACKED
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "conv" not in name:
                parameter.normal_(std=0.2)
    return model.train(False)


def logits(root: CausalLM, documents: list[torch.Tensor]) -> torch.Tensor:
    """Of all tokens of a row."""
    lengths = tuple(map(len, documents))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return root.logits(torch.cat(documents), positions, lengths, torch.arange(len(positions)))


def test_documents_of_very_unequal_lengths_are_those_alone() -> None:
    root = CausalLM(hybrid())
    assert root.layout.mixers is not None
    assert root.layout.mixers.names == ("model.layers.0.mamba", "model.layers.1.mamba")
    lengths = (3, 150, 70, 1, 301, 64, 9)
    assert len(batches(lengths)) == 4
    documents = [torch.randint(3, VOCAB, (length,)) for length in lengths]
    with torch.no_grad():
        row = logits(root, documents)
        alone = torch.cat([logits(root, [document]) for document in documents])
    assert float((row - alone).norm() / (alone - alone.mean(-1, keepdim=True)).norm()) < 1e-5


@pytest.mark.parametrize("level", ["full", "selective"])
def test_layers_that_are_computed_again_see_the_documents_of_their_own_forward(level: str) -> None:
    """Two rows of one length go forward before any goes back."""
    rows = [[torch.arange(3, 3 + n) for n in lengths] for lengths in ((4, 9), (6, 7))]
    found = []
    for recomputed in (False, True):
        root = CausalLM(hybrid()).train()
        if recomputed:
            apply_recompute(root, level)  # type: ignore[arg-type]
        losses = [logits(root, row).logsumexp(-1).sum() for row in rows]
        torch.stack(losses).sum().backward()
        found.append({name: p.grad for name, p in root.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_part_of_a_row_is_refused() -> None:
    """A model that takes long rows apart would carry a state across documents."""
    root = CausalLM(hybrid())
    assert root.layout.mixers is not None
    root.layout.mixers.expect((4, 9), CPU)
    with pytest.raises(RecipeError, match="gets a part of a row of 13 tokens"):
        root.model.get_submodule("model.layers.0.mamba")(torch.zeros(1, 8, 32))


def test_a_model_without_states_has_none() -> None:
    assert CausalLM(family_model("llama", tied=False)).layout.mixers is None


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=30))
def test_batches_hold_each_document_once_and_little_padding(lengths: list[int]) -> None:
    found = batches(lengths)
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))
    for group in found:
        longest = max(lengths[i] for i in group)
        assert longest <= mixers._SHORT or all(2 * lengths[i] >= longest for i in group)
    assert len(found) <= 7


@given(st.lists(st.integers(1, 200), min_size=2, max_size=12))
def test_a_row_comes_back_as_it_was(lengths: list[int]) -> None:
    layout = MixerLayout.of(lengths, CPU)
    assert layout is not None
    row = torch.arange(sum(lengths))[None, :, None].expand(-1, -1, 2).clone()
    parts = [layout.batch({"x": (row, "kept", None)}, i)["x"] for i in range(len(layout.shapes))]
    for part, shape in zip(parts, layout.shapes, strict=True):
        assert part[0].shape == (*shape, 2)
        assert part[1:] == ("kept", None)
    assert torch.equal(layout.row([part[0] for part in parts]), row)
    starts = (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)).tolist()
    assert sorted(torch.cat([part[0][:, 0, 0] for part in parts]).tolist()) == starts
