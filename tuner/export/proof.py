"""Proof that a written directory, loaded as its users will load it, is the trained model; what rounding costs it.

Every tensor has to be the trained one, recomputed and rounded once to its type (`expected`), and with the tensors as
they were trained in place of the rounded ones the model has to give the logits that training recorded. Then nothing but
rounding is left, whose cost is measured as a share of what training changed.

An adapter of a quantised base was trained on weights that codes and scales stand for. Merged into these it is the
trained model, up to rounding; merged into the original ones it is another model, which lacks the errors that the
adapter learned to live with. How much that matters depends on the model: it is measured (Kullback-Leibler divergence of
next-token distributions), on the prompts that the checkpoint has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from tuner.checkpoint.load import read_tensors
from tuner.errors import DataError
from tuner.export import verify, weights
from tuner.export.form import Form
from tuner.export.outputs import ExportedValues, Trained, in_peft, names_in_peft
from tuner.export.padding import VocabularyPadding, require_batches
from tuner.export.plan import ExportPlan
from tuner.export.source import ExportSource
from tuner.export.tensors import OpenFiles, held_tensor
from tuner.export.write import ADAPTER_WEIGHTS
from tuner.model.adapter import ADAPTER, LoraSpec
from tuner.model.attention import withdrawn
from tuner.model.experts import LORA_A, LORA_B
from tuner.model.peft_kinds import PeftSpec, applied_weights
from tuner.model.stored import Published, published, state_names

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
    dtype = weights.DTYPES["fp32" if plan.adapter == "keep" else plan.dtype]
    bases: tuple[Merged, ...] = ("quantized",) if weights.published_codes(plan.source) is not None else BASES
    kl, last = dict[Merged, float](), dict[Merged, torch.Tensor]()
    with torch.no_grad(), withdrawn():
        model = weights.plain_model(weights.read_config(plan.source), plan.source.head)
        _fill(plan, trained, model, None, "quantized")
        expected = verify.answers_of(model, probes.prompts)
        same = verify.compare(probes.logits, expected.last)
        verify.require_close(same, "the quantised base with its adapter is not the trained model", verify.SAME_MODEL)
        for base in bases:
            _fill(plan, trained, model, dtype, base)
            found = verify.answers_of(model, probes.prompts)
            last[base], kl[base] = found.last, verify.divergence(expected, found)
    closer: Merged = "original" if kl.get("original", math.inf) <= kl["quantized"] else "quantized"
    chosen = closer if plan.base == "auto" else plan.base or "quantized"  # of two as close the published weights
    return Merge(chosen, kl, len(expected.rows), last[chosen])


def _fill(plan: ExportPlan, trained: Trained, model: nn.Module, dtype: torch.dtype | None, base: Merged) -> None:
    """Merge the adapter into a base, rounded to ``dtype``, or not at all with None."""
    with OpenFiles() as files:
        values = ExportedValues(plan.source, trained, files, original=base == "original")
        verify.fill(model, values.tensors(dtype))


@dataclass(frozen=True)
class ExportProof:
    """How far the export's last logits are from the trained model's, and what it keeps where something was rounded."""

    difference: verify.LogitDifference
    kept: verify.Kept | None
    is_rounded_away: bool = False
    """Whether rounding costs more than a fifth of what training changed, or nobody knows what it was."""


def prove(
    plan: ExportPlan, directory: Path, trained: Trained, probes: verify.Probes, form: Form,
    padding: VocabularyPadding | None = None, merge: Merge | None = None,
) -> ExportProof:
    """Load the export as its users will and hold it against the trained model.

    What is merged into the base as it was before it was quantised is held against the model that was measured in its
    place. Raises VerificationError where it is another model.
    """
    loaded = _loaded(plan, directory, padding)
    if padding is not None:
        require_batches(loaded, probes, padding)
    merge = None if plan.adapter == "keep" else merge
    with withdrawn():
        written = verify.answers_of(loaded, probes.prompts)
        difference = verify.compare(probes.logits, written.last)
        if merge is not None:
            again = verify.compare(merge.last, written.last)
            verify.require_close(again, "the export's model is not the one that was measured", verify.SAME_MODEL)
        is_original = merge is not None and merge.base == "original"
        hold(plan, directory, trained, loaded, form, is_original)
        is_rounded = plan.dtype != "fp32" or is_original
        exact = verify.answers_of(loaded, probes.prompts) if is_rounded else written
        same = verify.compare(probes.logits, exact.last)
        verify.require_close(same, "the export's model is not the trained model", verify.SAME_MODEL)
        if not is_rounded:
            return ExportProof(difference, None)
        try:
            before = _before(plan, trained, loaded, form, probes, exact)
        except DataError:  # of a run that trained every weight: its base is not needed any more, and may be gone
            return ExportProof(difference, None, is_rounded_away=True)
        found = verify.kept(before, exact, written)
    if is_original and found.share <= 0:
        raise verify.not_published(
            f"merged into the original base, the export is further from the trained {plan.source.quantize} model (KL "
            f"{found.kl:.3g} nats a token) than training took it from its base ({found.gain:.3g}): nothing of it is "
            "left",
            hint="export with --base quantized",
        )
    return ExportProof(difference, found, is_rounded_away=found.share < verify.KEPT and not is_original)


def hold(
    plan: ExportPlan, directory: Path, trained: Trained, loaded: nn.Module, form: Form, is_original: bool = False
) -> None:
    """Hold every tensor of the loaded export against the trained one and put that, not rounded, in its place.

    Raises VerificationError for one that differs by more than rounding once, that is missing, or that is not the
    model's.
    """
    dtype = weights.DTYPES[plan.dtype]
    with OpenFiles() as files:
        expected = Expected(plan.source, trained.plain, files)
        if plan.adapter == "keep":
            named = names_in_peft(trained).items()
            values = {target: in_peft(name, expected.trained(name)) for target, name in named}
            written = load_file(directory / ADAPTER_WEIGHTS)
            for target, value in values.items():
                if target not in written or not torch.equal(written[target], value.to(dtype)):
                    raise verify.not_published(f"{target}: not the trained tensor rounded once to {dtype}")
            verify.fill_adapter(loaded, values)
            return
        if is_original:
            _hold(loaded, Expected(plan.source, trained.plain, files, original=True), form, dtype)
        _hold(loaded, expected, form, None if is_original else dtype)


@torch.no_grad()
def _hold(loaded: nn.Module, expected: Expected, form: Form, dtype: torch.dtype | None) -> None:
    """Nothing is compared where ``dtype`` is None."""
    there = state_names(loaded)
    left = set(there)
    for own_name, parts in expected.tensors():
        name = form.name(own_name)
        if name not in there:
            raise verify.not_published(f"transformers loads the export without {name}")
        left.discard(name)
        target, wrong, rows = there[name].data, 0, 0
        for part in parts:
            values, held = part.values, target
            if target.ndim:
                held = target[part.start : part.start + len(values)]
                rows += len(values)
            if values.shape != held.shape:
                raise verify.not_published(f"{name} has shape {list(target.shape)} in the export")
            if dtype is not None:
                wrong += int(part.wrong(held, expected.type_of(own_name, dtype)).sum())
            held.copy_(values)
        if wrong or (target.ndim and rows != len(target)):
            raise verify.not_published(
                f"{name}: {wrong:,} of its {target.numel():,} numbers are not the trained ones, rounded once to "
                f"{str(dtype).removeprefix('torch.')}"
            )
    if left and not form.elements:  # what else a whole checkpoint holds was copied, and is held against its hashes
        raise verify.not_published(f"the export holds {weights.some(sorted(left))}, which were not trained")


def _loaded(plan: ExportPlan, directory: Path, padding: VocabularyPadding | None) -> nn.Module:
    if plan.adapter != "keep":
        return verify.load_plain(directory, plan.source.head)
    base = weights.plain_base(plan.source)
    if plan.source.head == "score":  # as the card says to do
        base.config.get_text_config().pad_token_id = None if padding is None else padding.id
    return verify.load_adapter(directory, base)


def _before(
    plan: ExportPlan, trained: Trained, loaded: nn.Module, form: Form, probes: verify.Probes, exact: verify.Answers
) -> verify.Answers:
    """What the model answered before training, by the base's weights in the loaded one.

    A model of random weights knows nothing, and so does a head that training has put onto it.
    """
    source = plan.source
    if source.is_random or source.head == "score":
        return verify.uniform(exact)
    without: Any = getattr(loaded, "disable_adapter", nullcontext)
    if plan.adapter != "keep":
        entries = published(trained.plain)
        with OpenFiles() as files:
            base = weights.quantized_base(source, trained.plain)
            frozen = weights.Frozen(source, trained.plain, files, entries, base)
            values = ((form.name(each.name), frozen.tensor(each) or frozen.assembled(each)) for each in entries)
            verify.fill(loaded, values)
    with without():
        return verify.answers_of(loaded, probes.prompts)


EPSILON = 2.0**-24
"""Of one float32 rounding, relative."""


@dataclass(frozen=True)
class ProvenPart:
    """Rows of a tensor from ``start`` on, float64; float32 sums may be off by ``slack``, None where nothing is summed.
    """

    start: int
    values: torch.Tensor
    slack: torch.Tensor | None = None

    def wrong(self, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Which numbers are not these, rounded once to a type; ``found`` has it, or a wider one."""
        dtype = dtype if self.values.is_floating_point() else self.values.dtype
        if self.slack is None:
            return found.double() != self.values.to(dtype).double()
        low, high = (self.values - self.slack).to(dtype).double(), (self.values + self.slack).to(dtype).double()
        return ~((found.double() >= low) & (found.double() <= high))


@dataclass(frozen=True)
class _LowRank:
    """B ``[out, r]``, A ``[r, in]`` and DoRA's lengths ``[out]`` in float64, and what B·A is multiplied by."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    length: torch.Tensor | None = None

    def added_to(self, weight: torch.Tensor, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of these rows of a weight ``[out, in]`` with the adapter, and how far float32 may be from it."""
        b, rank = self.b[rows], len(self.a)
        merged = weight + self.scale * (b @ self.a)
        largest = abs(self.scale) * torch.outer(b.norm(dim=1), self.a.norm(dim=0))
        slack = EPSILON * ((rank + 4) * largest + 4 * weight.abs())
        if self.length is None:
            return merged, slack
        factor = (self.length[rows] / merged.norm(dim=1))[:, None]
        slack = slack + slack.norm(dim=1, keepdim=True) / merged.norm(dim=1, keepdim=True) * merged.abs()
        return merged * factor, factor.abs() * (slack + EPSILON * (math.sqrt(weight.shape[1]) + 8) * merged.abs())


PEFT_ROUNDINGS = 64
"""Of float32, in which peft may merge what a layer computes, as a share of the norms of a number's row and column."""


def _slack_of_merging(weight: torch.Tensor) -> torch.Tensor:
    norms = (torch.linalg.vector_norm(weight, dim=dim, keepdim=True) for dim in range(weight.ndim))
    return PEFT_ROUNDINGS * EPSILON * sum(norms, torch.zeros_like(weight))


class Expected:
    """Every tensor of the plain model as it was trained, by its name there."""

    def __init__(self, source: ExportSource, plain: PreTrainedModel, files: OpenFiles, original: bool = False) -> None:
        """``original`` takes the weights of a quantised base as they were before that. Raises DataError."""
        self._source, self._plain, self._entries = source, plain, published(plain)
        self._keys = {
            key.removeprefix(source.prefix).replace(".base_layer.", "."): key for key in source.checkpoint.index()
            if key.startswith(source.prefix)
        }
        self._used = set[str]()
        base = None if original else weights.quantized_base(source, plain)
        left = [entry for entry in self._entries if entry.name not in self._keys]
        self._frozen = weights.Frozen(source, plain, files, left, base)
        self._exact = weights.exact_names(source, plain)
        spec = weights.trainable_spec_of(source).adapter
        self._scale = spec.scale if isinstance(spec, LoraSpec) else 0.0
        self._applied: dict[str, torch.Tensor] | None = None if isinstance(spec, PeftSpec) else {}

    def tensors(self) -> Iterator[tuple[str, Iterator[ProvenPart]]]:
        """Each by its name, in parts that follow one another.

        Raises VerificationError where the checkpoint holds what belongs to none of them.
        """
        for entry in self._entries:
            yield entry.name, self._parts(entry)
        if left := sorted(self._keys.keys() - self._used):
            raise verify.not_published(f"trained, and in no tensor of the export: {weights.some(left)}")

    def type_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which a floating tensor is written: some are float32 whatever the others are."""
        return torch.float32 if name in self._exact else dtype

    def trained(self, name: str) -> torch.Tensor:
        """A trained tensor whole, by its name in the model with its adapter; the mean where one is exported."""
        self._used.add(name)
        found = [next(read_tensors(info, [self._keys[name]]))[1] for info in self._source.checkpoints]
        if not self._source.averaged:
            return found[0]
        return torch.stack([each.double() for each in found]).mean(0).float()

    def _parts(self, entry: Published) -> Iterator[ProvenPart]:
        if entry.name in (applied := self._applied_weights()):
            yield ProvenPart(0, values := applied[entry.name], _slack_of_merging(values))
            return
        owner, _, last = entry.name.rpartition(".")
        if f"{entry.name}{LORA_A}" in self._keys:
            yield from self._experts(entry, bool(getattr(self._plain.get_submodule(owner), "is_transposed", False)))
            return
        is_weight = last == "weight"
        adapter = self._low_rank(owner) if is_weight else None
        if adapter is not None and type(self._plain.get_submodule(owner)).__name__ == "Conv1D":  # [in, out]
            whole = torch.cat([rows for _, rows in self._rows(entry)])
            values, slack = adapter.added_to(whole.double().T)
            yield ProvenPart(0, values.T, slack.T)
            return
        rows_of_new = f"{owner}.new_rows"
        new = self.trained(rows_of_new).double() if is_weight and rows_of_new in self._keys else None
        for start, rows in self._rows(entry):
            if adapter is not None:
                values, slack = adapter.added_to(rows.double(), slice(start, start + len(rows)))
                yield ProvenPart(start, values, slack)
            elif new is not None:
                yield ProvenPart(start, _with_new(rows.double(), new, start, self._source.new_ids.start))
            else:
                yield ProvenPart(start, rows)

    def _applied_weights(self) -> dict[str, torch.Tensor]:
        """What layers with an adapter by peft's own config compute, which no formula here says; none of others."""
        if self._applied is None:
            self._applied = dict(applied_weights(weights.load_trained(self._source)))
            layers = tuple(f"{name.rpartition('.')[0]}." for name in self._applied)
            self._used |= {name for name in self._keys if name.startswith(layers)}
        return self._applied

    def _rows(self, entry: Published) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor without its adapter: the first row of each block, and the block."""
        is_trained, at = entry.name in self._keys, 0
        held = held_tensor(self.trained(entry.name)) if is_trained else self._frozen.tensor(entry)
        held = held or self._frozen.assembled(entry)
        for block in held.blocks(held.dtype):
            yield at, block
            at += len(block) if block.ndim else 1

    def _low_rank(self, owner: str) -> _LowRank | None:
        """The adapter of a linear layer; None where it has none."""
        a, b = (f"{owner}.lora_{which}.{ADAPTER}.weight" for which in "AB")
        if a not in self._keys:
            return None
        length = f"{owner}.lora_magnitude_vector.{ADAPTER}.weight"
        lengths = self.trained(length).double() if length in self._keys else None
        return _LowRank(self.trained(a).double(), self.trained(b).double(), self._scale, lengths)

    def _experts(self, entry: Published, is_transposed: bool) -> Iterator[ProvenPart]:
        """The weights of all experts ``[E, ...]``, one by one."""
        a, b = (self.trained(f"{entry.name}{end}").double() for end in (LORA_A, LORA_B))
        for start, block in self._rows(entry):
            for number, weight in enumerate(block.double(), start):
                one = _LowRank(a[number], b[number], self._scale)
                values, slack = one.added_to(weight.T if is_transposed else weight)
                values, slack = (values.T, slack.T) if is_transposed else (values, slack)
                yield ProvenPart(number, values[None], slack[None])


def _with_new(rows: torch.Tensor, new: torch.Tensor, start: int, first: int) -> torch.Tensor:
    """Rows of an embedding from ``start`` on, of which those of new tokens, from ``first`` on, were trained apart."""
    low, high = max(start, first), min(start + len(rows), first + len(new))
    if low < high:
        rows = torch.cat([rows[: low - start], new[low - first : high - first], rows[high - start :]])
    return rows
