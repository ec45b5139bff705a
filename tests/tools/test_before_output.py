"""Heads that do more than a product, and numbers counted from the padding token, are those of the model's class."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from tests.model.tiny import family_model
from tools.causal_cases import tiny_config
from tuner.model.build import decoder_blocks, head_layer
from tuner.model.root import CausalLM
from tuner.model.row_layout import from_padding

HEADS = ("bert", "electra", "modernbert-decoder", "xlm-roberta")


def decoder(model_type: str) -> PreTrainedModel:
    """A tiny model of the type, made causal, with weights that spread."""
    config = tiny_config(model_type)
    config.is_decoder = True
    torch.manual_seed(2)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("model_type", HEADS)
def test_logits_loss_and_gradients_go_through_the_models_own_head(model_type: str) -> None:
    model = decoder(model_type)
    root, head = CausalLM(model), head_layer(model)
    ids, n = torch.randint(3, 97, (11,), generator=torch.Generator().manual_seed(0)), 11
    row = (ids, torch.arange(n), (n,), torch.arange(n - 1))
    expected = model(input_ids=ids[None], use_cache=False).logits[0, : n - 1]
    assert torch.allclose(root.logits(*row), expected, atol=1e-5)
    cross_entropy(expected, ids[1:], reduction="sum").backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = root(*row, ids[1:])
    loss.backward()
    assert head_layer(model) is head
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-4), name


def test_a_head_that_fails_puts_the_output_layer_back() -> None:
    model = decoder("bert")
    root, head = CausalLM(model), head_layer(model)
    assert root.before_output is not None
    with pytest.raises(RuntimeError):
        root.before_output(torch.zeros(3, 5))
    assert head_layer(model) is head


def test_the_layers_of_an_encoder_do_not_hold_its_embedding() -> None:
    model = decoder("xlm-roberta")  # transformers names the class of its embeddings for sharding too
    embedding = model.get_input_embeddings()
    assert len(decoder_blocks(model)) == model.config.num_hidden_layers
    assert not any(part is embedding for block in decoder_blocks(model) for part in block.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_most_models_compute_nothing_there(family: str) -> None:
    root = CausalLM(family_model(family, tied=True))
    assert root.before_output is None
    assert root.layout.padding_number is None


def test_numbers_from_padding_are_those_of_each_document_alone() -> None:
    documents = [torch.tensor(ids) for ids in ([5, 6, 1, 7], [1, 1, 8], [9], [4, 1])]
    ids = torch.cat(documents)
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    alone = [RobertaEmbeddings.create_position_ids_from_input_ids(document[None], 1)[0] for document in documents]
    assert torch.equal(from_padding(ids, positions, 1), torch.cat(alone))
    # Tokens that continue documents in a cache: each the 8th, the 3rd and the 4th of its own.
    assert from_padding(torch.tensor([5, 6, 7]), torch.tensor([7, 2, 3]), 1).tolist() == [9, 4, 5]
