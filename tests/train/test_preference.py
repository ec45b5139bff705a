"""Preference losses on packed pairs, held to the papers' formulas in float64."""

import numpy as np
import torch
from torch import nn

from tuner.config.methods import DpoMethod
from tuner.data.batches import StepBatches, collate, without_targets
from tuner.data.prepared import Row
from tuner.model.output_layer import OutputLayer
from tuner.train.methods.method import build_method
from tuner.train.methods.preference import REFERENCE

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


def test_a_batch_that_keeps_a_rank_in_step_has_no_pairs_and_a_gradient() -> None:
    batch = without_targets(collate([pair_rows()]))
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    method = build_method(DpoMethod())
    columns = {name: torch.as_tensor(values) for name, values in method.columns(batch).items()}
    terms = method.terms(hidden, OutputLayer(torch.ones(VOCAB, WIDTH)), torch.empty(0, dtype=torch.int64), columns)
    loss = terms.loss({"pairs": 2.0})
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None
