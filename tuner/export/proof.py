"""Proof that a written directory, loaded as its users will load it, is the trained model; what rounding costs it.

Every tensor has to be the trained one, recomputed and rounded once to its type (`expected`), and with the tensors as
they were trained in place of the rounded ones the model has to give the logits that training recorded. Then nothing but
rounding is left, whose cost is measured as a share of what training changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tuner.errors import DataError, VerificationError
from tuner.export import verify
from tuner.export.answers import Answers, Kept, answers_of, kept, uniform
from tuner.export.expected import Expected
from tuner.export.form import Form
from tuner.export.frozen import Frozen
from tuner.export.merges import Merge
from tuner.export.outputs import Trained, in_peft, names_in_peft
from tuner.export.padding import Padding, require_batches
from tuner.export.plan import ExportPlan
from tuner.export.quantized import quantized_base
from tuner.export.tensors import OpenFiles
from tuner.export.weights import DTYPES, lora_spec, plain_base, some
from tuner.export.write import ADAPTER_WEIGHTS
from tuner.model.attention import withdrawn
from tuner.model.published import published, state_names


@dataclass(frozen=True)
class Proof:
    """How far the export's last logits are from the trained model's, and what it keeps where something was rounded."""

    difference: verify.Difference
    kept: Kept | None
    is_rounded_away: bool = False
    """Whether rounding costs more than a fifth of what training changed, or nobody knows what it was."""


def prove(
    plan: ExportPlan,
    directory: Path,
    trained: Trained,
    probes: verify.Probes,
    form: Form,
    padding: Padding | None = None,
    merge: Merge | None = None,
) -> Proof:
    """Load the export as its users will and hold it against the trained model.

    What is merged into the base as it was before it was quantised is held against the model that was measured in its
    place. Raises VerificationError where it is another model.
    """
    loaded = _loaded(plan, directory, padding)
    if padding is not None:
        require_batches(loaded, probes, padding)
    merge = None if plan.adapter == "keep" else merge
    with withdrawn():
        written = answers_of(loaded, probes.prompts)
        difference = verify.compare(probes.logits, written.last)
        if merge is not None:
            again = verify.compare(merge.last, written.last)
            verify.require_close(again, "the export's model is not the one that was measured", verify.SAME_MODEL)
        is_original = merge is not None and merge.base == "original"
        hold(plan, directory, trained, loaded, form, is_original)
        is_rounded = plan.dtype != "fp32" or is_original
        exact = answers_of(loaded, probes.prompts) if is_rounded else written
        same = verify.compare(probes.logits, exact.last)
        verify.require_close(same, "the export's model is not the trained model", verify.SAME_MODEL)
        if not is_rounded:
            return Proof(difference, None)
        try:
            before = _before(plan, trained, loaded, form, probes, exact)
        except DataError:  # of a run that trained every weight: its base is not needed any more, and may be gone
            return Proof(difference, None, is_rounded_away=True)
        found = kept(before, exact, written)
    if is_original and found.share <= 0:
        raise VerificationError(
            f"merged into the original base, the export is further from the trained {plan.source.quantize} model (KL "
            f"{found.kl:.3g} nats a token) than training took it from its base ({found.gain:.3g}): nothing of it is "
            "left; nothing was published",
            hint="export with --base quantized",
        )
    return Proof(difference, found, is_rounded_away=not (found.is_enough or is_original))


def hold(
    plan: ExportPlan, directory: Path, trained: Trained, loaded: nn.Module, form: Form, is_original: bool = False
) -> None:
    """Hold every tensor of the loaded export against the trained one and put that, not rounded, in its place.

    Raises VerificationError for one that differs by more than rounding once, that is missing, or that is not the
    model's.
    """
    dtype = DTYPES[plan.dtype]
    with OpenFiles() as files:
        expected = Expected(plan.source, trained.plain, files)
        if plan.adapter == "keep":
            names = names_in_peft(trained, lora_spec(plan.source.adapter or {}))
            values = {target: in_peft(name, expected.trained(name)) for target, name in names.items()}
            _hold_adapter(loaded, load_file(directory / ADAPTER_WEIGHTS), values, dtype)
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
            raise VerificationError(f"transformers loads the export without {name}; nothing was published")
        left.discard(name)
        target, wrong, rows = there[name].data, 0, 0
        for part in parts:
            values, held = part.values, target
            if target.ndim:
                held = target[part.start : part.start + len(values)]
                rows += len(values)
            if values.shape != held.shape:
                raise VerificationError(f"{name} has shape {list(target.shape)} in the export; nothing was published")
            if dtype is not None:
                wrong += int(part.wrong(held, expected.type_of(own_name, dtype)).sum())
            held.copy_(values)
        if wrong or (target.ndim and rows != len(target)):
            raise VerificationError(
                f"{name}: {wrong:,} of its {target.numel():,} numbers are not the trained ones, rounded once to "
                f"{str(dtype).removeprefix('torch.')}; nothing was published"
            )
    if left and not form.elements:  # what else a whole checkpoint holds was copied, and is held against its hashes
        raise VerificationError(f"the export holds {some(sorted(left))}, which were not trained; nothing was published")


def _hold_adapter(
    loaded: nn.Module, written: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> None:
    for target, value in values.items():
        if target not in written or not torch.equal(written[target], value.to(dtype)):
            raise VerificationError(f"{target}: not the trained tensor rounded once to {dtype}; nothing was published")
    verify.fill_adapter(loaded, values)


def _loaded(plan: ExportPlan, directory: Path, padding: Padding | None) -> nn.Module:
    if plan.adapter != "keep":
        return verify.load_plain(directory, plan.source.head)
    base = plain_base(plan.source)
    if plan.source.head == "score":  # as the card says to do
        base.config.get_text_config().pad_token_id = None if padding is None else padding.id
    return verify.load_adapter(directory, base)


def _before(
    plan: ExportPlan, trained: Trained, loaded: nn.Module, form: Form, probes: verify.Probes, exact: Answers
) -> Answers:
    """What the model answered before training, by the base's weights in the loaded one.

    A model of random weights knows nothing, and so does a head that training has put onto it.
    """
    source = plan.source
    if source.model.get("init") == "random" or source.head == "score":
        return uniform(exact)
    without: Any = getattr(loaded, "disable_adapter", nullcontext)
    if plan.adapter != "keep":
        entries = published(trained.plain)
        with OpenFiles() as files:
            frozen = Frozen(source, trained.plain, files, entries, quantized_base(source, trained.plain))
            values = ((form.name(each.name), frozen.tensor(each) or frozen.assembled(each)) for each in entries)
            verify.fill(loaded, values)
    with without():
        return answers_of(loaded, probes.prompts)


