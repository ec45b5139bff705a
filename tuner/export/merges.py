"""What an adapter of a quantised base can be merged into, and how far each answers from the model that was trained.

The adapter was trained on weights that codes and scales stand for. Merged into these it is the trained model, up to
rounding; merged into the original ones it is another model, which lacks the errors that the adapter learned to live
with. How much that matters depends on the model: it is measured (Kullback-Leibler divergence of next-token
distributions), on the prompts that the checkpoint has recorded.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tuner.export import verify
from tuner.export.outputs import ExportedValues, Trained
from tuner.export.plan import ExportPlan
from tuner.export.quantized import published_codes
from tuner.export.tensors import OpenFiles
from tuner.export.verify import answers_of, divergence
from tuner.export.weights import DTYPES, plain_model, read_config
from tuner.model.attention import withdrawn

Merged = Literal["original", "quantized"]
BASES: tuple[Merged, ...] = ("original", "quantized")
"""Of a base whose files hold codes alone there is the second only."""


@dataclass(frozen=True)
class Merge:
    """The base that is merged into, and the divergence of both from the trained model, in nats a token.

    ``last`` are the chosen model's logits ``[P, V]`` at the last position of each prompt, in the type that is written.
    """

    base: Merged
    kl: dict[Merged, float]
    tokens: int
    last: torch.Tensor


def measured(plan: ExportPlan, trained: Trained, probes: verify.Probes) -> Merge:
    """Put the trained model together, then what it would be merged to, one after the other in the same memory.

    A kept adapter is compared without rounding: what it answers on either base. Raises VerificationError where the
    model that was put together is not the one that was trained.
    """
    dtype = DTYPES["fp32" if plan.adapter == "keep" else plan.dtype]
    bases: tuple[Merged, ...] = ("quantized",) if published_codes(plan.source) is not None else BASES
    kl, last = dict[Merged, float](), dict[Merged, torch.Tensor]()
    with torch.no_grad(), withdrawn():
        model = plain_model(read_config(plan.source), plan.source.head)
        _fill(plan, trained, model, None, "quantized")
        expected = answers_of(model, probes.prompts)
        same = verify.compare(probes.logits, expected.last)
        verify.require_close(same, "the quantised base with its adapter is not the trained model", verify.SAME_MODEL)
        for base in bases:
            _fill(plan, trained, model, dtype, base)
            found = answers_of(model, probes.prompts)
            last[base], kl[base] = found.last, divergence(expected, found)
    closer: Merged = "original" if kl.get("original", math.inf) <= kl["quantized"] else "quantized"
    chosen = closer if plan.base == "auto" else plan.base or "quantized"  # of two as close the published weights
    return Merge(chosen, kl, len(expected.rows), last[chosen])


def _fill(plan: ExportPlan, trained: Trained, model: nn.Module, dtype: torch.dtype | None, base: Merged) -> None:
    """Merge the adapter into a base, rounded to ``dtype``, or not at all with None."""
    with OpenFiles() as files:
        values = ExportedValues(plan.source, trained, files, original=base == "original")
        verify.fill(model, values.tensors(dtype))
