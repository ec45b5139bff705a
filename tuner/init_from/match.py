"""Matching the sources of weights with a model, by headers alone: which tensor of which source goes where, what is
unclear about it, and the globs and names by which that is said.
"""

import difflib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from tuner.config.recipe import InitFrom
from tuner.config.value_types import CAPTURE, WILDCARD
from tuner.errors import RecipeError, TunerError
from tuner.init_from.sources import LORA_A, LORA_B, MAGNITUDE, SourceTensor, WeightSource, newest_version, open_source
from tuner.init_from.target import InitTarget, TargetTensor

KEY = "model.init_from"
How = Literal["whole", "rows", "assembled", "merged"]
SHOWN = 3


class Unclear(NamedTuple):
    """Why an entry is refused: the key to blame, what is wrong, and what to write."""

    key: str
    message: str
    hint: str | None = None


class Gift(NamedTuple):
    """What a place gets: a tensor, the first rows of it, one made of several, or what an adapter adds to it.

    ``names`` are the tensors in the source; of an adapter A, B and, with DoRA, the lengths.
    """

    entry: int
    place: TargetTensor
    how: How
    names: tuple[str, ...]


@dataclass
class Matched:
    """What one entry gives, and what of it does not."""

    number: int
    entry: InitFrom
    source: WeightSource
    gifts: list[Gift] = field(default_factory=list)
    renames: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By the glob of `rename`, names there and here."""
    unexpected: list[str] = field(default_factory=list)
    not_chosen: list[str] = field(default_factory=list)
    twins: list[str] = field(default_factory=list)
    """Second copies of tied weights."""
    missing: list[str] = field(default_factory=list)
    """Places that a source which was taken whole has nothing for."""
    problems: list[Unclear] = field(default_factory=list)

    def refuse(self, message: str, hint: str | None = None, key: str | None = None) -> None:
        """Note what is unclear, about the entry or one of its keys."""
        self.problems.append(Unclear(f"{KEY}.{self.number}" + (f".{key}" if key else ""), message, hint))


class InitPlan(NamedTuple):
    """What a model is given before its first step: every entry's gifts, of which later ones win."""

    target: InitTarget
    entries: tuple[Matched, ...]
    gifts: tuple[Gift, ...]
    """Those that count, in order: none that a later one replaces whole."""

    def source(self, number: int) -> WeightSource:
        """That of the entry with this number."""
        return next(one.source for one in self.entries if one.number == number)

    def shape(self, gift: Gift) -> tuple[int, ...]:
        """That of a place, or of its first rows where no others are given."""
        return self.source(gift.entry).tensors[gift.names[0]].shape if gift.how == "rows" else gift.place.shape

    @property
    def kept(self) -> list[TargetTensor]:
        """The places that stay as they were."""
        given = {gift.place.name for gift in self.gifts}
        return [place for name, place in self.target.places.items() if name not in given]


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


Homeless = list[tuple[str, str]]
"""What has no place: names in the source, and those that they would have here."""
MOST = 8
"""Problems that are shown at once."""


def plan_of(entries: Mapping[int, InitFrom], target: InitTarget, hashes: bool = False) -> InitPlan:
    """Match entries, by their numbers, with the model.

    Raises RecipeError with all that is unclear, DataError for damaged files.
    """
    found, problems = matched(entries, target, hashes)
    if problems:
        lines = [f"{each.key}: {each.message}" + (f"; {each.hint}" if each.hint else "") for each in problems]
        if len(lines) == 1:
            raise RecipeError(f"{problems[0].key}: {problems[0].message}", hint=problems[0].hint)
        shown = [*lines[:MOST], *([f"and {len(lines) - MOST} more"] if len(lines) > MOST else [])]
        raise RecipeError(f"{KEY}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in shown))
    return InitPlan(target, tuple(found), tuple(_last(found)))


def matched(entries: Mapping[int, InitFrom], target: InitTarget, hashes: bool) -> tuple[list[Matched], list[Unclear]]:
    """What each entry gives, and all that is unclear. Raises DataError for damaged files."""
    found, problems = [], list[Unclear]()
    for number, entry in entries.items():
        try:
            path = Path(entry.path)
            source = open_source(path if entry.every is None else newest_version(path), hashes)
        except RecipeError as error:
            problems.append(Unclear(f"{KEY}.{number}.path", error.message, error.hint))
            continue
        except TunerError as error:
            raise type(error)(f"{KEY}.{number}.path: {error.message}", error.hint) from error
        one = Matched(number, entry, source)
        _match(one, target)
        found.append(one)
        problems += one.problems
    return found, problems + [why for one in found if one.entry.every for why in _not_given_again(one, found)]


def _not_given_again(one: Matched, found: Sequence[Matched]) -> list[Unclear]:
    """Why an entry cannot be taken again: what else is made of its places is not known by then."""
    others = {gift.place.name: other.number for other in found if other is not one for gift in other.gifts}
    for gift in one.gifts:
        name, key = gift.place.name, f"{KEY}.{one.number}.every"
        if others.get(name, -1) > one.number or (name in others and gift.how == "rows"):
            words = f"{name} is replaced by newer versions, and {KEY}.{others[name]} gives it, too"
            return [Unclear(key, words, f"leave it out of one of them: exclude: [{name}]")]
        if gift.how == "merged":
            words = f"adds an adapter to {name}, which cannot be taken away again for a newer one"
            return [Unclear(key, words, "name exports of the merged model (tuner export-hf); or leave out every")]
    return []


def _last(found: Iterable[Matched]) -> list[Gift]:
    """The gifts that count: what a whole tensor replaces is not even read."""
    kept: dict[str, list[Gift]] = defaultdict(list)
    for one in found:
        for gift in one.gifts:
            if gift.how in ("whole", "assembled"):
                kept[gift.place.name].clear()
            kept[gift.place.name].append(gift)
    return sorted((gift for gifts in kept.values() for gift in gifts), key=lambda gift: gift.entry)


def _match(one: Matched, target: InitTarget) -> None:
    """Fill in what an entry gives."""
    chosen = _chosen(one)
    if one.problems:
        return
    layers: dict[str, dict[str, str]] = defaultdict(dict)
    """By layer, an adapter's parts by their ends."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    """By the name of a place, the names here of its parts by those in published files."""
    places: dict[str, list[str]] = defaultdict(list)
    homeless: Homeless = []
    for name in chosen:
        new = renamed(name, one.entry.rename)
        if new != name:
            pattern = next(pattern for pattern in one.entry.rename if is_renamed(name, pattern))
            one.renames[pattern].append((name, new))
        end = next((end for end in (LORA_A, LORA_B, MAGNITUDE) if new.endswith(end)), None)
        if end is not None and one.source.adapter is not None:
            layers[new.removesuffix(end)][end] = name
        elif (place := target.place_of(new)) is not None:
            places[place.name].append(name)
        elif (known := target.published(new)) is None:
            homeless.append((name, new))
        elif known[1].is_itself and (place := target.place_of(known[1].name)) is not None:
            places[place.name].append(name)
        else:
            groups[known[1].name][known[0]] = name
    _give_whole(one, target, places)
    _give_assembled(one, target, groups)
    if layers:
        give_adapter(one, target, layers, homeless)
    _without_place(one, target, homeless)
    _require_all(one, target)
    if not one.gifts and not one.problems:
        one.refuse(f"{one.source.path}: none of its {len(one.source.tensors)} tensors goes into this model")


def _chosen(one: Matched) -> list[str]:
    """The tensors that `load` means and `exclude` does not; a glob that means none is refused."""
    names = list(one.source.tensors)
    entry = one.entry
    for key, patterns in (("load", entry.load), ("exclude", entry.exclude)):
        for pattern in patterns:
            if not any(fits(pattern, name) for name in names):
                _refuse_pattern(one, key, pattern, names)
    loaded = [name for name in names if not entry.load or any(fits(pattern, name) for pattern in entry.load)]
    chosen = [name for name in loaded if not any(fits(pattern, name) for pattern in entry.exclude)]
    for pattern in entry.rename:
        if not any(is_renamed(name, pattern) for name in chosen):
            _refuse_pattern(one, "rename", pattern, chosen)
        elif all(_first(entry.rename, name) != pattern for name in chosen if is_renamed(name, pattern)):
            one.refuse(f"{pattern!r}: an earlier glob means all that it means", "write it before that one", "rename")
    if not chosen and not one.problems:
        one.refuse("load and exclude leave none of its tensors", "leave one of them out")
    one.not_chosen = [name for name in names if name not in set(chosen)]
    return chosen


def _first(table: Mapping[str, str], name: str) -> str | None:
    return next((pattern for pattern in table if is_renamed(name, pattern)), None)


def _refuse_pattern(one: Matched, key: str, pattern: str, names: Sequence[str]) -> None:
    parts = [part for name in names for part in name.split(".") if not part.isdigit()]
    near = nearest(pattern, names) if "." in pattern else nearest(pattern, parts)
    shown = near or list(names)[:SHOWN]
    what = "did you mean" if near else "its first names are"
    one.refuse(f"{pattern!r} means none of the tensors of {one.source.path}", f"{what} {listed(shown)}", key)


def _give_whole(one: Matched, target: InitTarget, places: Mapping[str, list[str]]) -> None:
    for name, found in places.items():
        place, sources = target.places[name], sorted(found, key=lambda each: each != name)  # noqa: B023 - used at once
        same = one.source.is_tied and name in target.twins.values()  # one weight, stored under both names
        one.twins += sources[1:] if same else []
        if len(sources) > 1 and not same:
            one.refuse(
                f"{listed(sources)} of {one.source.path} would all be {name}",
                f"leave out all but one: exclude: [{sources[1]}]",
                "rename" if any(_first(one.entry.rename, each) for each in sources) else "exclude",
            )
            continue
        if (how := fit(one, target, place, sources[0])) is not None:
            one.gifts.append(Gift(one.number, place, how, (sources[0],)))


def _give_assembled(one: Matched, target: InitTarget, groups: Mapping[str, Mapping[str, str]]) -> None:
    for name, parts in groups.items():
        entry, place = target.files[next(iter(parts))], target.places[name]
        absent = [part for part in entry.targets if part not in parts]
        if absent:
            one.refuse(
                f"{name} is made of {len(entry.targets)} tensors of published files, and {one.source.path} gives no "
                f"{listed(absent)}",
                f"take all of them, or leave them out: exclude: [{next(iter(parts.values()))}]",
            )
            continue
        sources = [parts[part] for part in entry.targets]
        shapes = [one.source.tensors[name].shape for name in sources]
        wrong = [each for each in zip(sources, shapes, entry.targets.values(), strict=True) if each[1] != each[2]]
        if wrong:
            source, shape, wanted = wrong[0]
            what = f"{source} of {one.source.path} is {list(shape)}, {list(wanted)} is wanted"
            one.refuse(what, f"leave it out: exclude: [{source}]")
        elif all(takes(one, target, place, part, one.source.tensors[part]) for part in sources):
            one.gifts.append(Gift(one.number, place, "assembled", tuple(sources)))


def _without_place(one: Matched, target: InitTarget, homeless: Sequence[tuple[str, str]]) -> None:
    """Tensors that go nowhere: refused, with the nearest names here, unless the entry is not strict."""
    one.unexpected = [name for name, _ in homeless]
    if not homeless or not one.entry.strict:
        return
    name, new = homeless[0]
    near = nearest(new, [*target.places, *target.twins, *target.files])
    would = f" (there {name})" if name != new else ""
    more = f", and {len(homeless) - 1} more of its tensors have none" if len(homeless) > 1 else ""
    one.refuse(
        f"{new}{would} of {one.source.path} has no place in this model{more}",
        (f"the nearest here are {', '.join(near)}: rename it" if near else "rename it")
        + ", leave it out with exclude, or write strict: false",
    )


def _require_all(one: Matched, target: InitTarget) -> None:
    """A source without `load` and `exclude` has something for every place, or it is refused unless it is not strict."""
    if one.entry.load or one.entry.exclude or one.problems:
        return
    given = {gift.place.name for gift in one.gifts}
    if one.source.adapter is not None:
        kept = bool(given & {name for name, place in target.places.items() if place.is_of_adapter})
        wanted = [name for name, place in target.places.items() if place.is_of_adapter] if kept else []
    else:
        places = {} if one.source.is_part else target.places
        wanted = [name for name, place in places.items() if not place.is_of_adapter]
    one.missing = [name for name in wanted if name not in given]
    if one.missing and one.entry.strict:
        near = nearest(one.missing[0], one.source.tensors)
        one.refuse(
            f"{one.source.path} has nothing for {listed(brief(one.missing))}",
            (f"the nearest there are {', '.join(near)}: rename it" if near else "rename its tensors")
            + ", say which to take with load, or write strict: false",
        )


def give_adapter(one: Matched, target: InitTarget, layers: Mapping[str, Mapping[str, str]], homeless: Homeless) -> None:
    """An adapter's tensors: into this run's own adapter, or into the weights that it was made for."""
    facts = one.source.adapter
    assert facts is not None
    keeps = one.entry.adapter == "keep" or (one.entry.adapter == "auto" and bool(target.scales))
    if keeps and not target.scales:
        one.refuse("keeps an adapter, and the recipe has none", "set adapter.kind, or write adapter: merge", "adapter")
        return
    if keeps and facts.use_dora != target.use_dora:
        kind = "dora" if facts.use_dora else "lora"
        one.refuse(f"the adapter of {one.source.path} is another kind than this run's", f"write adapter.kind: {kind}")
        return
    for layer, parts in layers.items():
        ends = [LORA_A, LORA_B, *([MAGNITUDE] if facts.use_dora else [])]
        if set(parts) != set(ends):
            have, lack = sorted(parts.values())[0], [layer + end for end in ends if end not in parts]
            one.refuse(f"{one.source.path} has {have} and no {listed(lack)}", f"leave it out: exclude: [{layer}]")
        elif keeps:
            _keep(one, target, layer, parts, homeless)
        elif (place := target.place_of(f"{layer}.weight")) is None:
            homeless += [(parts[LORA_A], f"{layer}.weight")]
        else:
            _merge(one, target, place, layer, [parts[end] for end in ends])


def _merge(one: Matched, target: InitTarget, place: TargetTensor, layer: str, names: Sequence[str]) -> None:
    a, b = (one.source.tensors[name] for name in names[:2])
    wanted = place.shape[::-1] if layer in target.transposed else place.shape
    made = (*b.shape[:1], *a.shape[1:])
    if not all(takes(one, target, place, name, one.source.tensors[name]) for name in names):
        return
    if len(a.shape) != 2 or len(b.shape) != 2 or made != wanted or a.shape[0] != b.shape[1]:  # noqa: PLR2004
        one.refuse(
            f"{names[0]} {list(a.shape)} and {names[1]} {list(b.shape)} of {one.source.path} are no adapter of "
            f"{place.name} {list(place.shape)}",
            f"leave it out: exclude: [{layer}]",
        )
        return
    one.gifts.append(Gift(one.number, place, "merged", tuple(names)))


def _keep(one: Matched, target: InitTarget, layer: str, parts: Mapping[str, str], homeless: Homeless) -> None:
    if layer not in target.scales:
        homeless += [(name, layer + end) for end, name in parts.items()]
        return
    rank, facts = one.source.tensors[parts[LORA_A]].shape[0], one.source.adapter
    assert facts is not None
    scale, own = facts.scale(rank), target.scales[layer]
    if abs(scale - own) > 1e-6 * max(scale, own):
        if any(problem.key.endswith(".adapter") for problem in one.problems):  # of another layer: said once
            return
        one.refuse(
            f"{one.source.path} adds B·A times {scale:g} to {layer}, this run's adapter times {own:g}",
            f"write adapter.r: {rank}, adapter.alpha: {facts.alpha:g} and "
            f"adapter.use_rslora: {str(facts.use_rslora).lower()}",
            "adapter",
        )
        return
    for end, name in parts.items():
        place = target.places[layer + end]
        if (how := fit(one, target, place, name)) is not None:
            one.gifts.append(Gift(one.number, place, how, (name,)))


_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def fit(one: Matched, target: InitTarget, place: TargetTensor, name: str) -> How | None:
    """How a tensor goes into a place; None where it does not, which is noted."""
    tensor = one.source.tensors[name]
    if not takes(one, target, place, name, tensor):
        return None
    if tensor.shape == place.shape:
        return "whole"
    fewer = place.grows and tensor.shape[1:] == place.shape[1:] and tensor.shape[0] < place.shape[0]
    if fewer and one.entry.grow:
        return "rows"
    hint = f"leave it out: exclude: [{name}]"
    if fewer:
        hint = f"write grow: true to fill the first {tensor.shape[0]:,} rows; or {hint}"
    one.refuse(f"{name} of {one.source.path} is {list(tensor.shape)}, {place.name} here is {list(place.shape)}", hint)
    return None


def takes(one: Matched, target: InitTarget, place: TargetTensor, name: str, tensor: SourceTensor) -> bool:
    """Whether a place can be given a tensor of this type; what speaks against it is noted."""
    if place.name in target.quantized:
        one.refuse(
            f"{place.name} is quantised as it is read (model.quantize), and cannot be given other weights after that",
            "write model.quantize: none, or export the given weights as a model first and name that",
        )
        return False
    is_buffer = place.name in (name for name, _ in target.skeleton.named_buffers())
    if tensor.dtype is None or (tensor.dtype not in _FLOATS and not is_buffer):
        one.refuse(f"{name} of {one.source.path} has the type {tensor.said}, which weights do not have")
        return False
    return True


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
NEAREST = 3
SHOWN_NUMBERS = 6


def fits(pattern: str, name: str) -> bool:
    """Whether a glob means a name: the whole of it or from a dot on, and everything below what it means."""
    return re.fullmatch(rf"(?:.*\.)?{_expression(pattern)}(?:\..*)?", name) is not None


def renamed(name: str, table: Mapping[str, str]) -> str:
    """The name by the first glob of ``table`` that means the whole of it; the name itself where none does."""
    for pattern, new in table.items():
        if found := re.fullmatch(_expression(pattern), name):
            return CAPTURE.sub(lambda number: found[int(number[1])], new)  # noqa: B023 - used at once
    return name


def is_renamed(name: str, pattern: str) -> bool:
    """Whether a glob of a table means the whole of a name."""
    return re.fullmatch(_expression(pattern), name) is not None


@cache
def _expression(pattern: str) -> str:
    """A glob as a regular expression with a group for each wildcard."""
    pieces = re.split(f"({WILDCARD.pattern})", pattern)
    groups = {"**": "(.*)", "*": r"([^.]*)"}
    return "".join(groups.get(piece) or re.escape(piece) for piece in pieces)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the known names that are most like a name or a glob, the likest first.

    Up to three more follow where they are as like as the third: `_proj` may stand for that of q, k, v and o.
    """
    found = difflib.get_close_matches(name, list(dict.fromkeys(known)), 2 * NEAREST, 0.5)
    likeness = [difflib.SequenceMatcher(None, one, name).ratio() for one in found]
    return [one for one, like in zip(found, likeness, strict=True) if like >= likeness[:NEAREST][-1]]


def brief(names: Sequence[str]) -> list[str]:
    """The same names in few: those that differ in numbers alone are one, `layers.{0-29}.mlp`, with their numbers."""
    groups: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for name in names:
        groups[_NUMBER.sub("{}", name)].append(tuple(map(int, _NUMBER.findall(name))))
    return [_written(template, numbers) for template, numbers in groups.items()]


def _written(template: str, numbers: Sequence[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, columns)) != len(set(numbers)):  # not every combination is there
        return f"{template.replace('{}', '*')} ({len(numbers)} of them)"
    for column in columns:
        template = template.replace("{}", _range(column), 1)
    return template


def _range(column: Sequence[int]) -> str:
    if len(column) == 1:
        return str(column[0])
    if column[-1] - column[0] == len(column) - 1:
        return f"{{{column[0]}-{column[-1]}}}"
    shown = ",".join(map(str, column[:SHOWN_NUMBERS]))
    return f"{{{shown}{',...' if len(column) > SHOWN_NUMBERS else ''}}}"
