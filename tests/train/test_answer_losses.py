"""Losses of answers and their gradients through whole models, held to the papers' formulas in float64."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.train.answers import Answers, Rows
from tests.train.synthetic import assembly_for, draw_lora_b, recipe_for, write_model
from tuner.config.load import load_recipe
from tuner.config.methods import DpoMethod, OrpoMethod
from tuner.data.batches import StepBatches, collate, without_targets
from tuner.data.prepared import Row
from tuner.model.output_layer import OutputLayer
from tuner.runtime.dist import RankInfo
from tuner.train.methods import preference
from tuner.train.methods.method import build_method
from tuner.train.methods.preference import REFERENCE
from tuner.train.step import TrainState, forward_backward

Log = dict[int, torch.Tensor]
"""The log-probability of each document's answer, by its number."""
BETA = 0.3
PACKED: Rows = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12, 13], [14, 15]]
"""Five global rows of eight pairs: some packed, with answers of 1 to 8 tokens."""
LAYOUTS: dict[str, tuple[Rows, int]] = {
    "packed, one micro-batch": (PACKED, 1),
    "packed, 2 micro-batches": (PACKED, 2),
    "packed, 8 micro-batches of which 3 have no row": (PACKED, 8),
    "a pair to a row": ([[2 * i, 2 * i + 1] for i in range(8)], 2),
    "another order of the pairs": ([[8, 9, 6, 7], [14, 15, 0, 1], [2, 3], [12, 13, 4, 5, 10, 11]], 2),
}


def sig(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def log_sig(x: torch.Tensor) -> torch.Tensor:
    return torch.log(sig(x))


class Pair(NamedTuple):
    """The log-ratios of a chosen and a rejected answer, how long both are, their log-probabilities, and its number."""

    c: torch.Tensor
    r: torch.Tensor
    m: int
    n: int
    log_c: torch.Tensor
    log_r: torch.Tensor
    number: int


def of_pairs(loss: Callable[[Pair], Any], sft: float = 0.0) -> Callable[[Answers, Log, Log], torch.Tensor]:
    """The mean over pairs, and a share of the negative log-likelihood per token of all chosen answers."""

    def mean(data: Answers, log_p: Log, mismatched: Log) -> torch.Tensor:
        total, nll = torch.zeros(2, dtype=torch.float64)
        tokens, pairs = 0, len(data.documents) // 2
        for i in range(pairs):
            c, r = data.documents[2 * i], data.documents[2 * i + 1]
            logs = log_p[2 * i], log_p[2 * i + 1]
            ratios = logs[0] - c.reference, logs[1] - r.reference
            total = total + loss(Pair(*ratios, len(c.answer), len(r.answer), *logs, i))
            nll, tokens = nll - logs[0], tokens + len(c.answer)
        return total / pairs + sft * nll / tokens

    return mean


def odds(average: torch.Tensor) -> torch.Tensor:
    return torch.exp(average) / (1 - torch.exp(average))


def kto(weights: tuple[float, float], with_kl: bool) -> Callable[[Answers, Log, Log], torch.Tensor]:
    def mean(data: Answers, log_p: Log, mismatched: Log) -> torch.Tensor:
        ratios = [mismatched[i].item() - one.reference_mismatched for i, one in enumerate(data.documents)]
        z = max(0.0, sum(ratios) / len(ratios)) if with_kl else 0.0
        total = torch.zeros((), dtype=torch.float64)
        for i, document in enumerate(data.documents):
            ratio = log_p[i] - document.reference
            value = sig(BETA * (ratio - z)) if document.desirable else sig(BETA * (z - ratio))
            total = total + weights[0 if document.desirable else 1] * (1 - value)
        return total / len(data.documents)

    return mean


def sppo(p: Pair) -> torch.Tensor:
    return (p.c - 0.5 / BETA) ** 2 + (p.r + 0.5 / BETA) ** 2


def bco(p: Pair) -> torch.Tensor:
    return -log_sig(BETA * p.c) - log_sig(-BETA * p.r)


def simpo(p: Pair) -> torch.Tensor:
    """With a margin of 0.7 in averages per token."""
    return -log_sig(BETA * p.log_c / p.m - BETA * p.log_r / p.n - 0.7)


DPO = {"kind": "dpo", "beta": BETA}
SIMPO = {"kind": "simpo", "beta": BETA, "gamma": 0.7}
PLAIN: dict[str, tuple[dict[str, Any], Callable[[Answers, Log, Log], torch.Tensor]]] = {
    "sigmoid": (DPO, of_pairs(lambda p: torch.log(1 + torch.exp(-BETA * (p.c - p.r))))),
    "smoothed": (
        {**DPO, "label_smoothing": 0.2},
        of_pairs(lambda p: -0.8 * log_sig(BETA * (p.c - p.r)) - 0.2 * log_sig(BETA * (p.r - p.c))),
    ),
    "robust": (
        {**DPO, "loss": "robust", "label_smoothing": 0.2},
        of_pairs(lambda p: (-0.8 * log_sig(BETA * (p.c - p.r)) + 0.2 * log_sig(BETA * (p.r - p.c))) / 0.6),
    ),
    "hinge": ({**DPO, "loss": "hinge"}, of_pairs(lambda p: max(1 - BETA * (p.c - p.r), 0 * p.c))),
    "ipo": ({**DPO, "loss": "ipo"}, of_pairs(lambda p: (p.c / p.m - p.r / p.n - 1 / (2 * BETA)) ** 2)),
    "sigmoid_norm": ({**DPO, "loss": "sigmoid_norm"}, of_pairs(lambda p: -log_sig(BETA * (p.c / p.m - p.r / p.n)))),
    "apo_zero": ({**DPO, "loss": "apo_zero"}, of_pairs(lambda p: 1 - sig(BETA * p.c) + sig(BETA * p.r))),
    "apo_down": ({**DPO, "loss": "apo_down"}, of_pairs(lambda p: sig(BETA * p.c) + 1 - sig(BETA * (p.c - p.r)))),
    "sppo": ({**DPO, "loss": "sppo"}, of_pairs(sppo)),
    "nca": (
        {**DPO, "loss": "nca"},
        of_pairs(lambda p: -log_sig(BETA * p.c) - 0.5 * log_sig(-BETA * p.c) - 0.5 * log_sig(-BETA * p.r)),
    ),
    "bco": ({**DPO, "loss": "bco"}, of_pairs(bco)),
    "several": (
        {**DPO, "loss": {"sppo": 0.8, "bco": 0.2}, "sft_weight": 0.4},
        of_pairs(lambda p: 0.8 * sppo(p) + 0.2 * bco(p), 0.4),
    ),
    "with margins": ({**DPO, "margin": "rows"}, of_pairs(lambda p: -log_sig(BETA * (p.c - p.r) - p.number / 4))),
    "cpo": ({"kind": "cpo", "beta": BETA}, of_pairs(lambda p: -log_sig(BETA * p.log_c - BETA * p.log_r), 1.0)),
    "orpo": (
        {"kind": "orpo", "beta": BETA},
        of_pairs(lambda p: -BETA * log_sig(torch.log(odds(p.log_c / p.m) / odds(p.log_r / p.n))), 1.0),
    ),
    "simpo": (SIMPO, of_pairs(simpo)),
    "simpo with sft": ({**SIMPO, "sft_weight": 0.5}, of_pairs(simpo, 0.5)),
    "kto": ({"kind": "kto", "beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.9}, kto((1.3, 0.9), True)),
    "kto against zero": ({"kind": "kto", "beta": BETA, "baseline": "zero"}, kto((1, 1), False)),
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {"full": {"kind": "none"}, "lora": {"kind": "lora", "r": 4}}
Flat = torch.Tensor


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainState]:
    """The state of a full training and of an adapter's, in float64, with adapters that are no zeros."""
    found = {}
    directory = tmp_path_factory.mktemp("answers")
    write_model(directory)
    for name, adapter in ADAPTERS.items():
        recipe = recipe_for(directory, adapter=adapter, model={"kernels": "torch"})
        state = assembly_for(recipe, [1, 2], RankInfo()).train_state
        torch.manual_seed(7)
        draw_lora_b(state.parameters)
        state.root.double()
        found[name] = state
    return found


def product(state: TrainState, method: str, data: Answers, rows: Rows, micro: int) -> tuple[float, Flat]:
    """Loss and gradients by the product, which adds up what all micro-batches gave."""
    section = load_recipe({"model": {"name_or_path": "a/b"}, "data": {"train": "x"}, "method": PLAIN[method][0]}).recipe
    chosen = replace(state, method=build_method(section.method))
    for parameter in state.parameters.values():
        parameter.grad = None
    sums, counts = forward_backward(chosen, 0, data.step(rows, micro))
    loss = sums.loss(counts).item()
    return loss, torch.cat([parameter.grad.flatten() for parameter in state.parameters.values()])  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def looped_over(states: dict[str, TrainState]) -> dict[str, tuple[Log, Log, Log]]:
    """What all losses of one state are made of."""
    data, found = Answers(16), {adapter: alone(state, Answers(16)) for adapter, state in states.items()}
    for _, _, others in found.values():  # or KTO's divergence would count for nothing
        assert sum(others[i].item() - one.reference_mismatched for i, one in enumerate(data.documents)) > 8
    return found


@contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield
    model.set_attn_implementation(ours)


def alone(state: TrainState, data: Answers) -> tuple[Log, Log, Log]:
    """The log-probabilities of answers, their gradients, and those of partners' answers, a document at a time."""

    def log_probability(prompt: list[int], answer: list[int]) -> torch.Tensor:
        ids = prompt + answer
        logits = state.root.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        total = torch.zeros((), dtype=torch.float64)
        for place in range(len(prompt), len(ids)):
            total = total + torch.log(torch.softmax(logits[place - 1], -1)[ids[place]])
        return total

    def gradient(log_p: torch.Tensor) -> Flat:
        return torch.cat([one.flatten() for one in torch.autograd.grad(log_p, list(state.parameters.values()))])

    with stock_attention(state.root.model):
        log_p = {i: log_probability(one.prompt, one.answer) for i, one in enumerate(data.documents)}
        with torch.no_grad():
            others = {
                i: log_probability(one.prompt, data.documents[data.partner(i)].answer)
                for i, one in enumerate(data.documents)
            }
    return {i: one.detach() for i, one in log_p.items()}, {i: gradient(one) for i, one in log_p.items()}, others


def looped(method: str, data: Answers, log_p: Log, gradients: Log, others: Log) -> tuple[float, Flat]:
    """Loss and gradients of them: those of the answers, each as often as the loss moves with its log-probability."""
    own = {i: one.clone().requires_grad_() for i, one in log_p.items()}
    loss = PLAIN[method][1](data, own, others)
    shares = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
    return loss.item(), torch.stack(shares) @ torch.stack([gradients[i] for i in own])


def equal(found: tuple[float, Flat], wanted: tuple[float, Flat], bound: float) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    assert wanted[1].norm() > 1e-4
    assert (found[1] - wanted[1]).norm() <= bound * wanted[1].norm()


QUICK = {"several", "orpo", "kto"}
"""What is made of answers' sums, of tokens and of others' answers; an adapter changes what these are, not the rest."""


@pytest.mark.parametrize(
    ("method", "adapter"),
    [
        pytest.param(method, adapter, marks=() if adapter == "full" or method in QUICK else pytest.mark.slow)
        for method in PLAIN
        for adapter in ADAPTERS
    ],
)
def test_the_loss_and_its_gradient_are_the_papers(
    states: dict[str, TrainState], looped_over: dict[str, tuple[Log, Log, Log]], method: str, adapter: str
) -> None:
    data, state = Answers(16), states[adapter]
    equal(product(state, method, data, PACKED, 2), looped(method, data, *looped_over[adapter]), 1e-6)


@pytest.mark.parametrize(
    ("method", "adapter"),
    [("several", "lora"), pytest.param("ipo", "full", marks=pytest.mark.slow), ("orpo", "full"), ("kto", "lora")],
)
def test_no_layout_of_the_global_batch_changes_them(states: dict[str, TrainState], method: str, adapter: str) -> None:
    """Nor the sums of tokens, the divergence, or the order of pairs in a row."""
    data, state = Answers(16), states[adapter]
    first, *others = [product(state, method, data, *layout) for layout in LAYOUTS.values()]
    for other in others:
        equal(other, first, 1e-9)


def test_a_divergence_below_zero_counts_as_zero(states: dict[str, TrainState]) -> None:
    found = {}
    for drift in (-3.0, 50.0):  # the reference of mismatched documents is likelier by it
        data = Answers(16, drift=drift)
        found[drift] = product(states["full"], "kto", data, PACKED, 2)
    assert not math.isclose(found[-3.0][0], found[50.0][0], rel_tol=1e-3)
    fewer = {**PLAIN["kto"][0], "baseline": "zero"}
    PLAIN["kto, no divergence"] = (fewer, PLAIN["kto"][1])
    try:
        equal(product(states["full"], "kto, no divergence", Answers(16, drift=50.0), PACKED, 2), found[50.0], 1e-9)
    finally:
        del PLAIN["kto, no divergence"]


VOCAB, WIDTH = 11, 6


def pair_rows() -> Row:
    """Two pairs of which the answers have 2, 3, 1 and 4 trained tokens."""
    lengths = np.array([4, 5, 3, 6], dtype=np.int32)
    trained = np.concatenate([np.arange(n) >= n - k for n, k in zip(lengths, (2, 3, 1, 4), strict=True)])
    ids = np.random.default_rng(0).integers(0, VOCAB, int(lengths.sum()))
    columns = {REFERENCE: np.array([-5.0, -7.0, -2.0, -9.0], dtype=np.float32)}
    return Row(ids, trained, lengths, np.arange(4), columns)


def test_dpo_is_the_papers_loss_with_its_gradient() -> None:
    torch.manual_seed(0)
    batch = collate([pair_rows()])
    hidden = torch.randn(len(batch.trained_positions), WIDTH, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(VOCAB, WIDTH, dtype=torch.float64))
    targets = torch.as_tensor(batch.targets[batch.trained_positions])
    method = build_method(DpoMethod(beta=0.3))
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    counts = method.counts(StepBatches(np.arange(1), 10, 18, [batch], documents=4))
    terms = method.terms(hidden, OutputLayer(weight), targets, columns)
    found = torch.autograd.grad(terms.loss(counts), [hidden, weight])

    log_p = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])[:, 0]
    chosen_a, rejected_a, chosen_b, rejected_b = (part.sum() for part in log_p.split([2, 3, 1, 4]))
    a = 0.3 * ((chosen_a + 5.0) - (rejected_a + 7.0))
    b = 0.3 * ((chosen_b + 2.0) - (rejected_b + 9.0))
    loss = (torch.log(1 + torch.exp(-a)) + torch.log(1 + torch.exp(-b))) / 2
    wanted = torch.autograd.grad(loss, [hidden, weight])
    assert torch.allclose(terms.loss(counts), loss, rtol=1e-12)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert float(terms.figures["accuracy"].mean(counts)) == float((torch.stack([a, b]) > 0).double().mean())


@pytest.mark.parametrize("section", [DpoMethod(), OrpoMethod()], ids=["dpo", "orpo"])
def test_rewards_that_are_only_logged_have_no_gradient(section: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with one would keep its factor until the backward pass, which predictions of memory would count."""
    found: list[bool] = []
    monkeypatch.setattr(preference, "reward_figures", lambda *pair: found.extend(r.requires_grad for r in pair) or {})
    batch, method = collate([pair_rows()]), build_method(section)
    hidden = torch.randn(len(batch.trained_positions), WIDTH, requires_grad=True)
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    targets = torch.as_tensor(batch.targets[batch.trained_positions])
    method.terms(hidden, OutputLayer(torch.ones(VOCAB, WIDTH)), targets, columns)
    assert found == [False, False]


def test_a_batch_that_keeps_a_rank_in_step_has_no_pairs_and_a_gradient() -> None:
    batch = without_targets(collate([pair_rows()]))
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    method = build_method(DpoMethod())
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    terms = method.terms(hidden, OutputLayer(torch.ones(VOCAB, WIDTH)), torch.empty(0, dtype=torch.int64), columns)
    loss = terms.loss({"pairs": 2.0})
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None
