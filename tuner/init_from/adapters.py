"""Where an adapter's tensors go: into this run's own adapter, or merged into the weights that it was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.init_from.fit import fit, takes
from tuner.init_from.plan import Gift, Matched, listed
from tuner.init_from.sources import LORA_A, LORA_B, MAGNITUDE, AdapterFacts
from tuner.init_from.target import Place, Target


def give_adapter(
    one: Matched, target: Target, layers: Mapping[str, Mapping[str, str]], homeless: list[tuple[str, str]]
) -> None:
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
            _keep(one, target, layer, parts, facts, homeless)
        elif (place := target.place_of(f"{layer}.weight")) is None:
            homeless += [(parts[LORA_A], f"{layer}.weight")]
        else:
            _merge(one, target, place, layer, [parts[end] for end in ends])


def _merge(one: Matched, target: Target, place: Place, layer: str, names: Sequence[str]) -> None:
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


def _keep(
    one: Matched,
    target: Target,
    layer: str,
    parts: Mapping[str, str],
    facts: AdapterFacts,
    homeless: list[tuple[str, str]],
) -> None:
    if layer not in target.scales:
        homeless += [(name, layer + end) for end, name in parts.items()]
        return
    rank = one.source.tensors[parts[LORA_A]].shape[0]
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
