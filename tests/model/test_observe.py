"""What is observed inside of layers is what the layers compute."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.tiny import VOCAB, family_model
from tuner.model.attention import Attended, register
from tuner.model.documents import Documents
from tuner.model.kernels import apply_native
from tuner.model.observe import largest_logit, observe
from tuner.model.root import CausalLM


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.sampled_from([0, 1, 3]), st.integers(1, 12), st.floats(0, 0.999),
)
def test_the_largest_logit_is_that_of_the_whole_table(
    lengths: list[int], heads: tuple[int, int], window: int, rows: int, rows_at: float
) -> None:
    n_tokens, generator = sum(lengths), torch.Generator().manual_seed(sum(lengths) + rows)
    query, key = (torch.randn(count, n_tokens, 4, generator=generator) for count in heads)
    documents = Documents.of(lengths, query.device)
    found = largest_logit(Attended(query, key, documents, window, None), rows_at, rows)
    scores = query @ key.repeat_interleave(heads[0] // heads[1], 0).mT / 2
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(n_tokens)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if window:
        seen &= place[:, None] - place < window
    rows = min(rows, n_tokens)
    start = int(rows_at * (n_tokens - rows + 1))
    expected = scores.masked_fill(~seen, -torch.inf)[:, start : start + rows].max()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def root_of(family: str) -> CausalLM:
    register()
    model = family_model(family, tied=True)
    model.set_attn_implementation("tuner_packed")
    return CausalLM(model)


def forward(root: CausalLM, lengths: tuple[int, ...] = (9, 4)) -> Any:
    ids = torch.arange(sum(lengths)) % VOCAB
    places = torch.cat([torch.arange(length) for length in lengths])
    return observe(root, ids, places, lengths, 0.0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "qwen3-moe"])
def test_every_layer_of_these_families_is_observed(family: str) -> None:
    root = root_of(family)
    before = {name: parameter.clone() for name, parameter in root.named_parameters()}
    random = torch.random.get_rng_state()
    found = forward(root)
    assert list(found.squares) == list(found.largest_logit) == [0, 1]
    has_experts = family in ("mixtral", "qwen3-moe")
    assert bool(found.alive) != has_experts and bool(found.routers) == has_experts
    for router in found.routers.values():
        assert float(router.chosen.sum()) == 13 * found.per_token
        assert router.said is not None and 0 < float(router.said[0]) < 13 * torch.tensor(4.0).log()
    assert all(torch.equal(before[name], parameter) for name, parameter in root.named_parameters())
    assert torch.equal(random, torch.random.get_rng_state())
    assert not any("tuner_observer" in vars(module) for module in root.modules())
    hooks = [hook for module in root.modules() for hook in module._forward_hooks.values()]
    assert not any(isinstance(hook, partial) for hook in hooks)


def test_dead_units_are_those_that_no_token_wakes() -> None:
    root = root_of("llama")
    gate = root.get_submodule("model.model.layers.1.mlp.gate_proj")
    with torch.no_grad():
        gate.weight[[3, 8, 20]] = 0.0  # type: ignore[index]
    alive = forward(root).alive
    assert set((~alive[1]).nonzero().flatten().tolist()) >= {3, 8, 20} and int((~alive[1]).sum()) < 20
    assert len(alive[0]) == 48


def test_compiled_kernels_give_the_same_figures() -> None:
    plain = forward(root_of("llama"))
    root = root_of("llama")
    apply_native(root.model)
    native = forward(root)
    for index in (0, 1):
        assert torch.equal(plain.alive[index], native.alive[index])
        torch.testing.assert_close(plain.largest_logit[index], native.largest_logit[index], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain.squares[index], native.squares[index], rtol=1e-5, atol=0.0)
