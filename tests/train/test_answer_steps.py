"""Losses of answers however a step is computed: recomputed, by native kernels, with DoRA, with capped logits."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from tests.model.test_output_layer import GEMMA
from tests.model.tiny import SHAPE
from tests.train.answers import Answers
from tests.train.synthetic import assembly_for, draw_lora_b, recipe_for
from tests.train.test_answer_losses import PACKED, alone, equal, looped, product
from tuner.config.methods import KtoMethod
from tuner.model.build import ModelSpec, build_model
from tuner.model.native.library import native_problem
from tuner.model.output_layer import OutputLayer
from tuner.runtime.dist import RankInfo
from tuner.train.methods.method import build_method
from tuner.train.methods.orpo import log_odds
from tuner.train.methods.preference import log_probabilities
from tuner.train.step import TrainState, optimizer_step


def state_for(directory: Path, **sections: dict[str, Any]) -> TrainState:
    state = assembly_for(
        recipe_for(directory, **{"model": {"kernels": "torch"}, **sections}), [1, 2], RankInfo()
    ).train_state
    torch.manual_seed(7)
    draw_lora_b(state.parameters)
    return state


@pytest.mark.parametrize("method", ["several", "kto"])
def test_recomputed_layers_give_the_same_bits_and_native_kernels_the_same_numbers(model: Path, method: str) -> None:
    data = Answers(16)
    plain = product(state_for(model), method, data, PACKED, 2)
    for recompute in ("selective", "full"):
        found = product(state_for(model, train={"gradient_checkpointing": recompute}), method, data, PACKED, 2)
        assert found[0] == plain[0] and torch.equal(found[1], plain[1])
    if native_problem() is None:
        equal(product(state_for(model, model={"kernels": "native"}), method, data, PACKED, 2), plain, 1e-5)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_mean_over_no_answers_is_left_out(model: Path, wanted: bool) -> None:
    data, state = Answers(4), state_for(model)
    data.documents = [replace(document, desirable=wanted) for document in data.documents]
    state.method = build_method(KtoMethod())
    figures = optimizer_step(state, 0, data.step([[0, 1], [2, 3]], 1), 1.0).read().figures
    assert set(figures) == {"reward_desirable" if wanted else "reward_undesirable", "kl"}


def test_dora_has_the_papers_gradients(model: Path) -> None:
    data, state = Answers(16), state_for(model, adapter={"kind": "dora", "r": 4})
    state.root.double()
    log_p = alone(state, data)
    for method in ("several", "kto"):
        equal(product(state, method, data, PACKED, 2), looped(method, data, *log_p), 1e-6)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_capped_logits_have_the_papers_gradients(tmp_path: Path, adapter: str) -> None:
    config = Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=0.5, architectures=["Gemma2ForCausalLM"])
    config.save_pretrained(tmp_path)
    build_model(ModelSpec(str(tmp_path), random_init=True), torch.float32, seed=5).save_pretrained(tmp_path)
    data, state = Answers(16), state_for(tmp_path, adapter={"kind": adapter})
    assert state.root.logit_transform.cap == 2.0
    state.root.double()
    log_p = alone(state, data)
    for method in ("sigmoid", "orpo"):
        equal(product(state, method, data, PACKED, 2), looped(method, data, *log_p), 1e-6)


def test_a_step_reads_nothing_from_the_device(model: Path) -> None:
    state, data, methods = state_for(model, adapter={"kind": "lora"}), Answers(16), ("several", "orpo", "kto")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for method in methods:
            product(state, method, data, PACKED, 2)
    calls = Counter(event.name for event in profile.events())
    assert calls["aten::segment_reduce"], "the profile saw the step"
    reads = sum(calls[f"aten::{name}"] for name in ("_local_scalar_dense", "item", "nonzero"))
    assert reads <= 2 * len(methods), "those of the test, which reads each loss"


def test_an_answer_without_tokens_is_certain_and_sums_do_not_depend_on_what_lies_around_them() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    targets, lengths = torch.randint(0, 11, (9,)), torch.tensor([4, 0, 5, 0])
    found = log_probabilities(hidden, OutputLayer(weight), targets, lengths)
    plain = torch.log_softmax((hidden @ weight.T).double(), -1).gather(1, targets[:, None])[:, 0]
    assert found[1] == found[3] == 0
    torch.testing.assert_close(found[::2].double(), torch.stack([plain[:4].sum(), plain[4:].sum()]), rtol=1e-6, atol=0)
    shares = torch.tensor([1.0, 7.0, -2.0, 3.0])
    gradients = torch.autograd.grad((found * shares).sum(), [hidden, weight])
    wanted = torch.autograd.grad(plain[:4].sum() - 2 * plain[4:].sum(), [hidden, weight])
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-6)
    again = log_probabilities(hidden, OutputLayer(weight), targets, lengths)
    later = log_probabilities(hidden[4:], OutputLayer(weight), targets[4:], lengths[2:])
    assert torch.equal(again, found) and torch.equal(later, found[2:])
    second = torch.autograd.grad((again * shares).sum(), [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(gradients, second, strict=True))


def test_odds_are_exact_near_both_ends_and_finite_at_certainty() -> None:
    log_p = torch.tensor([-1e-6, -1e-3, -0.5, -0.6931, -0.6932, -3.0, -80.0], dtype=torch.float32, requires_grad=True)
    exact = log_p.detach().double().requires_grad_()
    plain = exact - torch.log(-torch.expm1(exact))
    torch.testing.assert_close(log_odds(log_p).double(), plain, rtol=1e-6, atol=1e-6)
    (found,), (wanted,) = (torch.autograd.grad(of.sum(), [x]) for of, x in ((log_odds(log_p), log_p), (plain, exact)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    certain = torch.zeros(2, requires_grad=True)
    odds = log_odds(certain)
    assert odds.isfinite().all() and torch.autograd.grad(odds.sum(), [certain])[0].isfinite().all()
