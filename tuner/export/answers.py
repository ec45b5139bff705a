"""What models answer to the probes of a run, and how much of what training changed an export keeps."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

POSITIONS = 16
"""The last ones of each prompt, whose distributions are compared."""
KEPT = 0.8
"""Of what training changed: where rounding costs more than a fifth, `auto` takes the type that keeps it."""
NOISE = 1e-9
"""Nats that the order of float32 sums makes."""
DIGITS = 6
"""Of a divergence in nats; what is below differs with the order of float32 sums."""


@dataclass(frozen=True)
class Answers:
    """Logits ``[P, V]`` at the last position of each prompt, scores ``[P, 1]``, and log-probabilities ``[N, V]``.

    The latter are the distributions over the next token at the last positions of each prompt; of a reward model those
    of which of each two prompts is preferred, ``[P (P - 1) / 2, 2]``.
    """

    last: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Kept:
    """How much of what training changed is in an export, and the divergences behind it, in nats a distribution."""

    share: float
    kl: float
    """From the trained model to the export."""
    gain: float
    """From the trained model to the base that it began as."""
    tokens: int
    """How many distributions these are means over."""


@torch.no_grad()
def answers_of(model: nn.Module, prompts: Sequence[Sequence[int]]) -> Answers:
    """What a model answers, in float32, each prompt run alone and unpacked."""
    last, rows = list[torch.Tensor](), list[torch.Tensor]()
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
        last.append(logits if logits.ndim == 1 else logits[-1])  # transformers' own choice of a scored token
        if logits.ndim > 1:
            rows.append(torch.log_softmax(logits[-POSITIONS:], -1))
    scores = torch.stack(last)
    if scores.shape[-1] == 1:
        rows = [torch.log_softmax(pairs(scores), -1)]
    return Answers(scores, torch.cat(rows))


def pairs(scores: torch.Tensor) -> torch.Tensor:
    """Scores ``[P, 1]`` of each two prompts ``[P (P - 1) / 2, 2]``: logits of which is preferred."""
    return torch.combinations(scores[:, 0])


def uniform(answers: Answers) -> Answers:
    """What a model answers that knows nothing: of weights that are drawn."""
    return Answers(torch.zeros_like(answers.last), torch.full_like(answers.rows, -math.log(answers.rows.shape[-1])))


def divergence(expected: Answers, found: Answers) -> float:
    """Kullback-Leibler divergence of what was found from what was expected: nats, the mean over all distributions.

    The larger one of that as they are and that with logits scaled to unit spread: a model whose answers are all but
    uniform would be close to any other. Infinite where one is not finite.
    """
    spread, scaled = _spread(expected, found)
    return round(max(_divergence(expected, found), _divergence(spread, scaled)), DIGITS)


def kept(base: Answers, trained: Answers, export: Answers) -> Kept:
    """How much of what training changed from the base is in an export.

    The changes are those of log-probabilities, and each weighs as the trained model gives it: how far the export's
    change goes along the training's is the share that is left of small ones, whose gain in loss is linear in them. What
    rounding adds across it costs nothing then; it does count in the second figure, the export's gain over the base on
    text of the trained model as a share of the training's, KL(trained, base) - KL(trained, export). The smaller one is
    taken. Answers that are all but uniform are compared with logits of unit spread.
    """
    said = _divergence(trained, base), _divergence(trained, export)
    if len(trained.rows) and float(trained.rows.std(-1).mean()) < 1:
        trained, base, export = _spread(trained, base, export)
    gain, kl = _divergence(trained, base), _divergence(trained, export)
    along = whole = 0.0
    for (one, before), after in zip(_each(trained, base), export.rows, strict=True):
        along += float(_expected(one, (after.double() - before) * (one - before)))
        whole += float(_expected(one, (one - before) ** 2))
    if gain <= NOISE:  # nothing was changed
        share = 1.0 if kl <= NOISE else 0.0
    else:
        share = min(along / whole, 1 - kl / gain, 1.0) if math.isfinite(along) and math.isfinite(kl) else 0.0
    return Kept(max(round(share, 4), 0.0), round(said[1], DIGITS), round(said[0], DIGITS), len(trained.rows))


def _spread(first: Answers, *others: Answers) -> list[Answers]:
    """Answers whose logits are scaled to unit spread of the first ones'."""
    scale = 1 / max(float(first.rows.std(-1).mean()), 1e-12) if len(first.rows) else 1.0
    return [Answers(each.last, torch.log_softmax(each.rows * scale, -1)) for each in (first, *others)]


def _divergence(expected: Answers, found: Answers) -> float:
    total = sum(float(_expected(one, one - other)) for one, other in _each(expected, found))
    mean = total / max(len(expected.rows), 1)
    return max(mean, 0.0) if math.isfinite(mean) else math.inf


def _each(first: Answers, second: Answers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one, other in zip(first.rows, second.rows, strict=True):
        yield one.double(), other.double()


def _expected(log: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean of values under a distribution; what it gives no probability counts for nothing."""
    chance = log.exp()
    return torch.where(chance > 0, chance * values, 0.0).sum()
