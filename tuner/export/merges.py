"""What an adapter of a quantised base can be merged into, and how far each answers from the model that was trained.

The adapter was trained on weights that codes and scales stand for. Merged into these it is the trained model, up to
rounding; merged into the original ones it is another model, which lacks the errors that the adapter learned to live
with. How much that matters depends on the model: it is measured (Kullback-Leibler divergence of next-token
distributions), on the prompts that the checkpoint has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from tuner.errors import VerificationError
from tuner.export import verify
from tuner.export.outputs import Trained, Values
from tuner.export.plan import Base, ExportPlan
from tuner.export.quantized import published_codes
from tuner.export.tensors import OpenFiles
from tuner.export.weights import DTYPES, plain_model, read_config
from tuner.model.attention import withdrawn

Merged = Literal["original", "quantized"]
BASES: tuple[Merged, ...] = ("original", "quantized")
"""Of a base whose files hold codes alone there is the second only."""
DIGITS = 6
"""Of a divergence in nats; what is below differs with the order of float32 sums."""
ORIGINAL_KL = 0.69
"""Nats a token that an export on the original base may be from the trained model: one bit.

A text that the trained model writes then costs the export up to a bit a token more than it costs its writer; beyond
that the two give most tokens other probabilities, and what training measured is no measure of the export.
"""


@dataclass(frozen=True)
class Merge:
    """The base that is merged into, and the divergence of both from the trained model, in nats a token.

    ``last`` are the chosen model's logits ``[P, V]`` at the last position of each prompt, in the type that is written.
    """

    base: Merged
    kl: dict[Merged, float]
    tokens: int
    last: torch.Tensor

    def check(self, plan: ExportPlan) -> None:
        """Raise VerificationError where the divergence of the chosen one is above its bound."""
        bound = ORIGINAL_KL if self.base == "original" else verify.ROUNDED_KL
        if not self.kl[self.base] <= bound:
            other = "--dtype fp32" if self.base == "quantized" else "--base quantized"
            raise VerificationError(
                f"merged into the {self.base} base in {plan.dtype}, the KL from the trained {plan.source.quantize} "
                f"model is {self.kl[self.base]:.3g} nats a token, allowed {bound:g}; nothing was published",
                hint=f"export with {other}",
            )


def measured(plan: ExportPlan, trained: Trained, probes: verify.Probes) -> Merge:
    """Put the trained model together, then what it would be merged to, one after the other in the same memory.

    A kept adapter is compared without rounding: what it answers on either base. Raises VerificationError where the
    model that was put together is not the one that was trained.
    """
    dtype = DTYPES["fp32" if plan.adapter == "keep" else plan.dtype]
    bases: tuple[Merged, ...] = ("quantized",) if published_codes(plan.source) is not None else BASES
    expected, kl, last = list[torch.Tensor](), dict[Merged, float](), dict[Merged, torch.Tensor]()
    with torch.no_grad(), withdrawn():
        model = plain_model(read_config(plan.source), plan.source.head)
        _fill(plan, trained, model, None, "quantized")
        same = verify.compare(probes.logits, _answer(model, probes.prompts, expected.append))
        verify.require_close(same, "the quantised base with its adapter is not the trained model", verify.SAME_MODEL)
        for base in bases:
            _fill(plan, trained, model, dtype, base)
            divergence = _Divergence(expected)
            last[base] = _answer(model, probes.prompts, divergence.add)
            kl[base] = divergence.mean
    chosen = _chosen(plan.base or "quantized", kl)
    return Merge(chosen, kl, sum(len(each) for each in expected), last[chosen])


def _fill(plan: ExportPlan, trained: Trained, model: nn.Module, dtype: torch.dtype | None, base: Merged) -> None:
    """Merge the adapter into a base, rounded to ``dtype``, or not at all with None."""
    with OpenFiles() as files:
        values = Values(plan.source, trained, files, original=base == "original")
        verify.fill(model, values.whole() if dtype is None else values.rounded(dtype))


def _answer(
    model: nn.Module, prompts: Sequence[Sequence[int]], see: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Have ``see`` the model's logits at each position: ``[L, V]`` in float32 for each prompt.

    Of a reward model they are those of which of each two prompts is preferred: ``[P (P - 1) / 2, 2]``. Returns the
    logits at the last positions ``[P, V]``, scores ``[P, 1]``.
    """
    last = []
    for prompt in prompts:
        logits = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].float()
        if logits.ndim > 1:
            see(logits)
        last.append(logits if logits.ndim == 1 else logits[-1])
    rows = torch.stack(last)
    if rows.shape[-1] == 1:
        see(verify.pairs(rows))
    return rows


class _Divergence:
    """That of one model's distributions from those of another, whose logits come in the same order.

    As in `verify`, the larger of that of the distributions as they are and that of logits scaled to unit spread: a
    model whose answers are all but uniform would be close to any other.
    """

    def __init__(self, expected: Sequence[torch.Tensor]) -> None:
        self._expected, self._count = iter(expected), sum(map(len, expected))
        spread = sum(float(logits.std(-1).sum()) for logits in expected) / max(self._count, 1)
        self._scales = (1.0, 1.0 / max(spread, 1e-12))
        self._totals = [0.0, 0.0]

    def add(self, found: torch.Tensor) -> None:
        """The next logits."""
        before = next(self._expected).double()
        for index, scale in enumerate(self._scales):
            said, meant = log_softmax(found.double() * scale, -1), log_softmax(before * scale, -1)
            self._totals[index] += float(kl_div(said, meant, reduction="sum", log_target=True))

    @property
    def mean(self) -> float:
        """Nats for each distribution; infinite where one is not finite."""
        means = [total / max(self._count, 1) for total in self._totals]
        return round(max(*means, 0.0), DIGITS) if all(map(math.isfinite, means)) else math.inf


def _chosen(wanted: Base, kl: dict[Merged, float]) -> Merged:
    """The one that is asked for, or the closer one: of two as close the original, whose weights were published."""
    if wanted != "auto":
        return wanted
    return "original" if kl.get("original", math.inf) <= kl["quantized"] else "quantized"
