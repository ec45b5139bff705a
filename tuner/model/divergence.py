"""Distillation at the output layer: how far the student's distributions are from a teacher's, with the exact gradient.

The generalised Jensen-Shannon divergence of Agarwal et al. (GKD, https://arxiv.org/abs/2306.13649). With teacher t,
student s and m = beta t + (1 - beta) s it is KL(t || s) for beta 0, KL(s || t) for beta 1, and between them
beta KL(t || m) + (1 - beta) KL(s || m), which tends to nothing at both ends: these two are no limits of it. Both
distributions are softmaxes of logits over the temperature T, and the divergence counts T^2 times, so that its gradient
keeps its size (Hinton et al. 2015, https://arxiv.org/abs/1503.02531).

As the cross-entropy's (:mod:`tuner.model.output_layer`), the logits of both models exist for a chunk of positions at a
time; normalisers, logarithms and gradients are float32, or float64 for float64 inputs.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from tuner.model.output_layer import Head, OutputLayer, block_logits, product_dtype, spans

Tail = Literal["rest", "renormalise"]
FIGURES = ("divergence", "ce", "teacher_ce", "agreement", "tail")
"""Sums over positions: the divergence as it is, cross-entropies of student and teacher in nats at temperature 1, how
often both models' most probable tokens are one, and the teacher's probability outside of what is known of it."""


@dataclass(frozen=True)
class Distillation:
    """The loss at a position: ``(1 - ce_weight) T^2 D + ce_weight CE``."""

    beta: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0


class Comparison(NamedTuple):
    """A student against a teacher at n positions."""

    divergence: torch.Tensor
    """[n]"""
    gradient: torch.Tensor
    """[n, shared vocabulary]: of the divergence, by the student's logits over the temperature."""
    teacher_ce: torch.Tensor
    """[n]"""
    top: torch.Tensor
    """int64[n]: the teacher's most probable token."""
    tail: torch.Tensor
    """[n]"""


def divergence(log_s: torch.Tensor, log_t: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence ``[n]`` of distributions over the same classes, and its slopes by ``log_s`` ``[n, classes]``.

    A slope may lack a multiple of its class's probability in s, the same for all, which no normalised gradient sees.
    Nothing is exactly zero where both are the same. A class that t never chooses (``log_t`` -inf) needs beta < 1.
    """
    ratio, s, t = log_t - log_s, log_s.exp(), log_t.exp()
    if beta == 0:
        return torch.where(t == 0, 0.0, t * ratio).sum(-1), s - t
    if beta == 1:
        slopes = -s * ratio
        return slopes.sum(-1), slopes
    # log(m / s) and log(m / t), neither as a difference of large numbers nor with an exponential that overflows.
    share = torch.where(ratio > 0, ratio.new_full((), 1 - beta), ratio.new_full((), beta))
    common = torch.log1p(share * torch.expm1(-ratio.abs()))
    to_s, to_t = common + ratio.clamp(min=0), common - ratio.clamp(max=0)
    slopes = (beta - 1) * s * to_s
    return slopes.sum(-1) - beta * torch.where(t == 0, 0.0, t * to_t).sum(-1), slopes


@dataclass(frozen=True)
class WholeTeacher:
    """A teacher with its hidden states ``[N, D]`` and its output layer, whose weight is whole."""

    hidden: torch.Tensor
    head: OutputLayer

    def chunk(self, span: slice) -> "_Logits":
        """Those of some positions."""
        return _Logits(self.logits(span))

    def logits(self, span: slice) -> torch.Tensor:
        """Those of some positions, ``[n, V]``."""
        dtype = product_dtype(self.hidden)
        layer = Head.of(self.hidden, self.head.weight, self.head.bias, dtype)
        logits = layer.products(self.hidden[span].to(dtype))
        self.head.transform.apply_(logits)
        return logits


@dataclass(frozen=True)
class _Logits:
    logits: torch.Tensor

    @property
    def vocabulary(self) -> int:
        """Of how many tokens, from the first, it has probabilities."""
        return self.logits.shape[1]

    def compare(self, at: slice, log_s: torch.Tensor, targets: torch.Tensor, how: Distillation) -> Comparison:
        """The student's ``log_s`` ``[n, shared vocabulary]``, at the temperature, against it at these positions."""
        logits = self.logits[at, : log_s.shape[1]].to(log_s.dtype)
        log_t = _log_softmax(logits, how.temperature)
        found, slopes = divergence(log_s, log_t, how.beta)
        gradient = slopes.addcmul_(log_s.exp(), slopes.sum(-1, keepdim=True), value=-1)
        plain = log_t if how.temperature == 1 else torch.log_softmax(logits, -1)
        return Comparison(found, gradient, _of(targets, plain), logits.argmax(-1), torch.zeros_like(found))


def top_tokens(
    hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, count: int, temperature: float, vocabulary: int
) -> dict[str, torch.Tensor]:
    """What :class:`TopTeacher` keeps of a teacher, of as many tokens, by the names of its fields: int64 and float32.

    The distribution is that over the first ``vocabulary`` tokens.
    """
    teacher, found = WholeTeacher(hidden, head), list[dict[str, torch.Tensor]]()
    targets = head.share(targets)
    rows = max(1, block_logits(head.weight) // len(head.weight))
    for span in spans(max(1, len(hidden)), rows):
        logits = teacher.logits(span)[:, :vocabulary].float()
        log_t = _log_softmax(logits, temperature)
        log_p, ids = log_t.topk(count, -1)
        following = -_of(targets[span], torch.log_softmax(logits, -1))
        rest = log_t.scatter(1, ids, -torch.inf).logsumexp(-1)
        found.append({"ids": ids, "log_p": log_p, "rest": rest, "next": following})
    return {name: head.join(torch.cat([each[name] for each in found])) for name in found[0]}


@dataclass(frozen=True)
class TopTeacher:
    """The k most probable tokens of a teacher at N positions, the most probable one first, and what is left of it.

    ``tail: rest`` makes one more class of all other tokens, in both distributions: the divergence is a lower bound of
    the whole one, and how the student spreads that class is not in the loss. ``tail: renormalise`` gives the teacher's
    remaining probability to its k tokens: the student learns to give none to others, a sharper teacher than there was.
    """

    ids: torch.Tensor
    """int[N, k]"""
    log_p: torch.Tensor
    """[N, k]: log-probabilities of these tokens among the whole vocabulary, at the temperature."""
    rest: torch.Tensor
    """[N]: the logarithm of the probability of all others."""
    next: torch.Tensor
    """[N]: the log-probability of the token that follows in the data, at temperature 1."""
    vocabulary: int
    tail: Tail = "rest"

    def chunk(self, span: slice) -> "TopTeacher":
        """That of some positions."""
        rows = {name: getattr(self, name)[span] for name in ("log_p", "rest", "next")}
        return replace(self, ids=self.ids[span].long(), **rows)

    def compare(self, at: slice, log_s: torch.Tensor, targets: torch.Tensor, how: Distillation) -> Comparison:
        """The student against it: with the classes of the k tokens and, where there are others, one of all these."""
        ids, log_p, rest = self.ids[at], self.log_p[at].to(log_s), self.rest[at].to(log_s)
        tail = rest.exp()
        if self.tail == "renormalise":
            log_p, rest = log_p - log_p.logsumexp(-1, keepdim=True), torch.full_like(rest, -torch.inf)
        own = log_s.gather(1, ids)
        has_others = ids.shape[1] < log_s.shape[1]
        if has_others:
            others = log_s.scatter(1, ids, -torch.inf)
            own_rest = others.logsumexp(-1, keepdim=True)
            own, log_p = torch.cat([own, own_rest], -1), torch.cat([log_p, rest[:, None]], -1)
        found, slopes = divergence(own, log_p, how.beta)
        gradient = log_s.exp() * -slopes.sum(-1, keepdim=True)
        if has_others:  # the slope of their class is shared out as the student shares out the class
            gradient.addcmul_((others - own_rest).exp_(), slopes[:, -1:])
        gradient.scatter_add_(1, ids, slopes[:, : ids.shape[1]])
        return Comparison(found, gradient, -self.next[at].to(log_s), ids[:, 0], tail)


TeacherLogits = WholeTeacher | TopTeacher
"""What is known of a teacher at N positions."""
Taught = _Logits | TopTeacher
"""That at those of a chunk."""


def distil(
    hidden: torch.Tensor, head: OutputLayer, targets: torch.Tensor, teacher: TeacherLogits, how: Distillation
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss at N positions, with its gradient, and the sums of :data:`FIGURES`; zeros for no positions.

    Shapes: hidden ``[N, D]``, targets int64 ``[N]``, none of them ignored. Where one model has more tokens than the
    other, both distributions are cut to those that both have, and normalised over these; the cross-entropy is not.
    """
    exact = torch.promote_types(product_dtype(hidden), torch.float32)
    sums = torch.zeros(len(FIGURES), dtype=exact, device=hidden.device)

    def chunk(span: slice, logits: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
        taught = teacher.chunk(span)
        return _chunk(logits, targets[span], taught, how, sums, wants_gradient=wants_gradient, scale=head.scale)

    loss = head.summed(hidden, chunk)
    return loss, dict(zip(FIGURES, sums.unbind(), strict=True))


def _chunk(
    logits: torch.Tensor, targets: torch.Tensor, taught: Taught, how: Distillation, sums: torch.Tensor, *,
    wants_gradient: bool, scale: torch.Tensor | None,
) -> torch.Tensor:
    """The loss of a chunk, whose logits become its gradient where that is wanted, ``scale`` times as large where the
    output layer says so; adds to the figures' ``sums``."""
    own, shared = torch.zeros_like(sums), min(logits.shape[1], taught.vocabulary)
    for at in spans(len(logits), max(1, block_logits(logits) // logits.shape[1])):
        exact, wanted = logits[at].to(sums.dtype), targets[at]
        log_s = _log_softmax(exact[:, :shared], how.temperature)
        found = taught.compare(at, log_s, wanted, how)
        whole = how.temperature == 1 and shared == logits.shape[1]
        plain = log_s if whole else torch.log_softmax(exact, -1)
        ce = _of(wanted, plain)
        agreed = exact.argmax(-1) == found.top
        own += torch.stack([each.sum(dtype=sums.dtype) for each in (found[0], ce, found[2], agreed, found.tail)])
        if wants_gradient:
            gradient = plain.exp_().mul_(how.ce_weight)
            gradient.scatter_add_(1, wanted[:, None], gradient.new_full((len(wanted), 1), -how.ce_weight))
            gradient[:, :shared].add_(found.gradient, alpha=(1 - how.ce_weight) * how.temperature)
            logits[at] = gradient if scale is None else gradient.mul_(scale)
    sums += own
    return (1 - how.ce_weight) * how.temperature**2 * own[0] + how.ce_weight * own[1]


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)


def _of(targets: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each target."""
    return -log_p.gather(1, targets[:, None])[:, 0]
