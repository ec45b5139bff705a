"""Weights gathered in bfloat16 are those that autocast rounds anyway: the same bits of loss and gradients."""

import copy

import pytest
import torch
from torch import nn

from tests.model.tiny import FAMILIES, VOCAB, family_model
from tuner.model.build import decoder_blocks
from tuner.model.root import CausalLM
from tuner.parallel.fsdp import SMALL, rounded_weights


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
    layer.product, layer.norm = nn.Linear(8, 8), nn.LayerNorm(SMALL, device="meta")
    assert rounded_weights(layer) == {layer.product.weight}
    layer.experts = nn.Parameter(torch.empty(2, SMALL // 2 + 1, device="meta"))
    assert rounded_weights(layer) == set()


def test_what_is_not_float32_or_may_do_more_than_multiply_is_not_rounded() -> None:
    class Router(nn.Linear):
        """Its forward may be anything."""

    layer = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16), Router(8, 8), nn.Embedding(8, 8)])
    assert rounded_weights(layer) == set()
