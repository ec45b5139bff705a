"""Giving a plan's tensors to a model that is on the CPU, one after the other, each hashed as it is read; and the report
of that in words: a line for the console, and the file of a run's directory.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tuner.checkpoint.storage import tensor_bytes
from tuner.config.recipe import InitFrom
from tuner.errors import DataError, RecipeError
from tuner.init_from.match import KEY, Gift, InitPlan, Matched, brief, plan_of
from tuner.init_from.target import InitTarget, layers_of_new_rows, own_names
from tuner.model.low_rank import LowRank
from tuner.model.stored import assembled, state_names


class Giver:
    """Gives a model what a plan says, in two parts: its own weights, and then those that training adds to it.

    With ``frozen_only`` it gives what is not trained: all else is in the checkpoint that a run is resumed from.
    """

    def __init__(self, plan: InitPlan, new_ids: range = range(0), frozen_only: bool = False) -> None:
        self.plan = plan
        self._new_ids, self._frozen_only = new_ids, frozen_only
        self._hashes: dict[tuple[int, str], str] = {}

    @torch.no_grad()
    def give_weights(self, model: PreTrainedModel) -> None:
        """Change the weights of a model without an adapter, in place. Host memory beyond them: one tensor.

        Raises DataError for a file that cannot be read.
        """
        own = state_names(model)
        for gift in self.plan.gifts:
            if not gift.place.is_of_adapter and not (self._frozen_only and gift.place.trained):
                self._give(gift, own[gift.place.name])

    @torch.no_grad()
    def give_rest(self, model: nn.Module) -> None:
        """Change the adapter of a model, in place, and the rows of new tokens, which were made since."""
        if self._frozen_only:
            return
        own, apart = own_names(model), layers_of_new_rows(model)
        for gift in self.plan.gifts:
            if gift.place.is_of_adapter:
                self._give(gift, own[gift.place.name])
            elif gift.place.grows and self._new_ids and gift.how in ("whole", "rows"):
                self._give_new_rows(gift, own[gift.place.name], apart.get(gift.place.name))

    def facts(self) -> dict[str, Any]:
        """What a checkpoint notes of what was given: of each entry its source, how many tensors, and their hash."""
        entries = [_facts(one, self._hashes) for one in self.plan.entries]
        return {"entries": entries, "frozen": sum(not gift.place.trained for gift in self.plan.gifts)}

    @torch.no_grad()
    def value(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """A gift that is no adapter, on the CPU; where it is the first rows, these alone. Raises DataError."""
        gift = self.plan.gifts[index]
        made = torch.empty(self.plan.shape(gift), dtype=dtype)
        self._give(gift, made)
        return made

    def _give(self, gift: Gift, target: torch.Tensor) -> None:
        target = target.detach()
        if gift.how == "merged":
            target.copy_(self._low_rank(gift).added_to(target))
        elif gift.how == "assembled":
            entry = next(entry for entry in self.plan.target.files.values() if entry.name == gift.place.name)
            read = [self._read(gift.entry, name) for name in gift.names]
            parts = dict(zip(entry.targets, read, strict=True))  # by their names in published files
            target.copy_(assembled(self.plan.target.skeleton, gift.place.name, parts))
        else:
            found = self._read(gift.entry, gift.names[0])
            (target[: len(found)] if gift.how == "rows" else target).copy_(found)

    def _give_new_rows(self, gift: Gift, weight: torch.Tensor, layer: Any) -> None:
        """Rows of new tokens that the source has: they were set to the mean of the others meanwhile."""
        found = self._read(gift.entry, gift.names[0])
        start, stop = self._new_ids.start, min(self._new_ids.stop, len(found))
        if stop > start:
            into = weight.detach()[start:stop] if layer is None else layer.new_rows.detach()[: stop - start]
            into.copy_(found[start:stop])

    def _low_rank(self, gift: Gift) -> LowRank:
        facts = self.plan.source(gift.entry).adapter
        assert facts is not None
        a, b, *length = (self._read(gift.entry, name).float() for name in gift.names)
        transposed = gift.place.name.removesuffix(".weight") in self.plan.target.transposed
        return LowRank(a, b, facts.scale(len(a)), length[0].flatten() if length else None, transposed)

    def _read(self, entry: int, name: str) -> torch.Tensor:
        source = self.plan.source(entry)
        tensor = source.tensors[name]
        found = tensor.read()
        if tuple(found.shape) != tensor.shape:
            raise DataError(f"{source.path}: {name} changed while it was read")
        if (entry, name) not in self._hashes:
            digest = hashlib.sha256(tensor_bytes(found)).hexdigest()
            self._hashes[entry, name] = f"{name} {tensor.said} {list(tensor.shape)} {digest}"
        return found


def _facts(one: Matched, hashes: Mapping[tuple[int, str], str]) -> dict[str, Any]:
    lines = sorted(line for (entry, _), line in hashes.items() if entry == one.number)
    source = one.source
    shapes = [[source.tensors[name].shape for name in gift.names] for gift in one.gifts]
    form = sorted(f"{gift.place.name} {gift.how} {shape}" for gift, shape in zip(one.gifts, shapes, strict=True))
    return {
        "path": str(source.path), "kind": source.kind, "step": source.step, "tensors": len(lines),
        "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        "form": hashlib.sha256("\n".join(form).encode()).hexdigest(),
        "trained": sum(gift.place.trained for gift in one.gifts),
    }


def give_frozen(entries: Mapping[int, InitFrom], target: InitTarget, model: PreTrainedModel) -> None:
    """Give a base what a run gave those of its weights that it did not train, in place.

    Raises DataError where the sources are not there any more, or are other ones.
    """
    try:
        Giver(plan_of(entries, target), frozen_only=True).give_weights(model)
    except RecipeError as error:
        words = f"what the run gave its frozen weights is not there as it was: {error.message}"
        raise DataError(words, hint=f"restore it: {KEY}") from error


WHAT = {
    "whole": "taken", "rows": "taken, first rows", "assembled": "taken, put together", "merged": "taken, adapter merged"
}


def summary(plan: InitPlan) -> str:
    """What each entry gave, a line each, and how much of the model stays as it was."""
    counted = set(plan.gifts)
    lines = []
    for one in plan.entries:
        given = [gift for gift in one.gifts if gift in counted]
        counts = [f"{len(given)} of {len(plan.target.places)} weights"]
        counts += [f"{count} {what}" for what, count in _counts(one, given) if count]
        lines.append(f"{one.source.title}: {', '.join(counts)}")
    kept = len(plan.kept)
    stay = "1 weight stays as it was" if kept == 1 else f"{kept} weights stay as they were"
    lines.append(stay if kept else "every weight is given")
    return "\n".join(lines)


def _counts(one: Matched, given: Sequence[Gift]) -> Iterator[tuple[str, int]]:
    yield "renamed", sum(map(len, one.renames.values()))
    yield "merged", sum(gift.how == "merged" for gift in given)
    yield "grown", sum(gift.how == "rows" for gift in given)
    yield "replaced by a later entry", len(one.gifts) - len(given)
    yield "without a place", len(one.unexpected)
    yield "missing there", len(one.missing)


def report(plan: InitPlan, facts: Mapping[str, Any] | None = None) -> str:
    """Everything that was matched, by entry: taken, renamed, missing, unexpected and grown; with hashes, if known."""
    lines: list[str] = []
    counted = set(plan.gifts)
    for one in plan.entries:
        lines.append(f"model.init_from.{one.number}: {one.source.title}")
        if facts is not None:
            noted = facts["entries"][one.number]
            lines.append(f"  read: {noted['tensors']} tensors, sha256 {noted['sha256']}")
        lines += _of_entry(one, counted)
        lines.append("")
    lines.append(f"weights that stay as they were: {len(plan.kept)} of {len(plan.target.places)}")
    lines += _names(place.name for place in plan.kept)
    return "\n".join(lines) + "\n"


def _of_entry(one: Matched, counted: set[Gift]) -> Iterator[str]:
    for how, what in WHAT.items():
        gifts = [gift for gift in one.gifts if gift.how == how and gift in counted]
        if gifts:
            yield f"  {what}: {len(gifts)}"
            yield from (f"  {line}" for line in _names(_named(gift, one) for gift in gifts))
    for pattern, pairs in one.renames.items():
        yield f"  renamed by {pattern!r} -> {one.entry.rename[pattern]!r}: {len(pairs)}"
        yield f"    {pairs[0][0]} -> {pairs[0][1]}" + (", ..." if len(pairs) > 1 else "")
    left: tuple[tuple[str, list[str]], ...] = (
        ("replaced by a later entry", [gift.place.name for gift in one.gifts if gift not in counted]),
        ("the same weight under its other name", one.twins), ("without a place here (unexpected)", one.unexpected),
        ("missing there", one.missing), ("not chosen", one.not_chosen),
    )
    for what, names in left:
        if names:
            yield f"  {what}: {len(names)}"
            yield from (f"  {line}" for line in _names(names))


def _named(gift: Gift, one: Matched) -> str:
    """A place, with its shape, and types where they differ."""
    tensor = one.source.tensors[gift.names[0]]
    shape = ", ".join(map(str, gift.place.shape))
    rows = f" {tensor.shape[0]:,} of {gift.place.shape[0]:,} rows" if gift.how == "rows" else ""
    return f"{gift.place.name} [{shape}] {tensor.said.lower()}{rows}"


def _names(names: Iterable[str]) -> list[str]:
    return [f"  {name}" for name in brief(list(names))]
