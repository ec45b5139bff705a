"""The report of what a model was given, in words: a line for the console, and the file of a run's directory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tuner.init_from.names import brief
from tuner.init_from.plan import Gift, InitPlan, Matched
from tuner.init_from.target import TargetTensor

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
        ("the same weight under its other name", one.twins),
        ("without a place here (unexpected)", one.unexpected),
        ("missing there", one.missing),
        ("not chosen", one.not_chosen),
    )
    for what, names in left:
        if names:
            yield f"  {what}: {len(names)}"
            yield from (f"  {line}" for line in _names(names))


def _named(gift: Gift, one: Matched) -> str:
    """A place, with its shape, and types where they differ."""
    tensor = one.source.tensors[gift.names[0]]
    rows = f" {tensor.shape[0]:,} of {gift.place.shape[0]:,} rows" if gift.how == "rows" else ""
    return f"{gift.place.name} {_shape(gift.place)} {tensor.said.lower()}{rows}"


def _shape(place: TargetTensor) -> str:
    return f"[{', '.join(map(str, place.shape))}]"


def _names(names: Iterable[str]) -> list[str]:
    return [f"  {name}" for name in brief(list(names))]
