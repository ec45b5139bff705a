"""Figures of each decoder layer around one step: RMS of weights, gradients and updates, and what a forward observes.

Sums of squares are taken where the step's phases change: after the gradients are summed, and after the update. What the
processes have of them is added up in one collective, in which every element of a weight counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from tuner.data.batches import Batch
from tuner.model.build import decoder_blocks
from tuner.model.observe import Observation, observe
from tuner.model.root import CausalLM, embedding_parameters, outer_parameters
from tuner.parallel.fsdp import holders, sum_of_squares
from tuner.parallel.mesh import Mesh
from tuner.runtime import phase
from tuner.runtime.device import to_device
from tuner.runtime.parts import local
from tuner.train.step import StepConfig, TrainState

# Figures by their names in metrics.jsonl, before a slash and the name of a layer.
WEIGHTS, GRADIENTS, UPDATES = "weight_rms", "grad_rms", "update_rms"
OUTPUTS, LOGITS, DEAD = "activation_rms", "attention_logit_max", "dead_share"
BUSIEST, UNUSED, ENTROPY, PROCESS = "router_busiest", "router_unused", "router_entropy", "router_busiest_process"
ROUTER_MAX, ROUTER_MEAN = "router_logit_max", "router_logit_mean"
STATES = {"decay_log": "A_log", "state_norm": "norm"}
"""Of layers that keep a state with a decay: what is measured of them, each with `_min` and `_max` after its name."""
EMBEDDING, OUTPUT, REST = "embedding", "output", "rest"
_MAXIMA = "maxima"
_GOLDEN = (math.sqrt(5) - 1) / 2


def layer_name(index: int) -> str:
    """A decoder layer's name in metrics.jsonl."""
    return f"layers.{index}"


def rows_at(step: int) -> float:
    """The share of a row at which a step's sampled block of attention begins: spread over the row from step to step."""
    return step * _GOLDEN % 1.0


class InternalsWatch:
    """Sums of squares of a step's gradients, of its update and of the weights after it, by layer.

    The weights before the update are copied: on a CUDA device to the host's memory, so that its own peak stays.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._mesh = state, state.step_config.mesh
        self._groups = layers_of(state.root, state.parameters)
        self._before: dict[str, torch.Tensor] = {}
        self._gradients: list[torch.Tensor] = []

    @contextmanager
    def around_update(self) -> Iterator[None]:
        """Watch the optimizer step inside."""

        def at(part: str) -> None:
            if part == "optimizer":
                self._before_update()

        with phase.observed(at):
            yield

    @torch.no_grad()
    def _before_update(self) -> None:
        scale = self._state.scaling.of_gradients().double().square()
        every = self._state.gradients()
        for names in self._groups.values():
            found = self._zero()
            for name in names:
                if name in every:
                    found = found + self._share(self._state.parameters[name], local(every[name]))
            self._gradients.append(found / scale)
        self._before = {n: local(p.detach()).to("cpu", copy=True) for n, p in self._state.parameters.items()}

    @torch.no_grad()
    def sums(self) -> dict[str, torch.Tensor]:
        """This process's shares of the sums of squares, float64 ``[groups]`` by figure; forgets the copies."""
        updates, weights = [], []
        for names in self._groups.values():
            changed, now = self._zero(), self._zero()
            for name in names:
                parameter = self._state.parameters[name]
                own = local(parameter.detach()).float()
                changed = changed + self._share(parameter, own - self._before.pop(name).to(own.device).float())
                now = now + self._share(parameter, own)
            updates.append(changed)
            weights.append(now)
        gradients, self._gradients = self._gradients, []
        by_figure = {WEIGHTS: weights, GRADIENTS: gradients, UPDATES: updates}
        return {figure: torch.stack(sums) for figure, sums in by_figure.items()}

    def figures(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The root mean squares by name, of sums over all processes."""
        counts = [sum(self._state.parameters[name].numel() for name in names) for names in self._groups.values()]
        return {
            f"{figure}/{layer}": math.sqrt(value / count) if value >= 0 else math.nan for figure, found in sums.items()
            for layer, value, count in zip(self._groups, found.tolist(), counts, strict=True)
        }

    def _share(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """This process's share of a sum of squares over a parameter, or over what has its shape."""
        return sum_of_squares([part]) / holders(parameter, self._mesh) if part.numel() else self._zero()

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._state.step_config.device)


def layers_of(root: CausalLM, names: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Names of trained parameters by decoder layer; others are those of ``embedding``, ``output``, or the ``rest``."""
    found: dict[str, list[str]] = {EMBEDDING: []}
    owner: dict[int, str] = {}
    for index, block in enumerate(decoder_blocks(root.model, "logging.internals")):
        found[layer_name(index)] = []
        owner |= {id(parameter): layer_name(index) for parameter in block.parameters()}
    embeddings, ends = embedding_parameters(root), outer_parameters(root)
    for name, parameter in names.items():
        place = EMBEDDING if name in embeddings else OUTPUT if name in ends else owner.get(id(parameter), REST)
        found.setdefault(place, []).append(name)
    return {layer: own for layer, own in found.items() if own}


@dataclass(frozen=True)
class Inside:
    """A forward that was observed, as sums that add up over processes."""

    observation: Observation
    mesh: Mesh
    counts: bool
    """Whether the documents of this process's microbatch count; others only keep it in step."""
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of this process's shares of weights, by figure: the largest value, or the negative of the smallest one."""

    @staticmethod
    def of(root: CausalLM, batch: Batch, step_config: StepConfig, step: int) -> Inside:
        """Observe one microbatch in a forward of its own. Collective under FSDP2."""
        ids, places = (to_device(array, step_config.device) for array in (batch.input_ids, batch.position_ids))
        with step_config.autocast():
            found = observe(root, ids, places, batch.lengths, rows_at(step))
        return Inside(found, step_config.mesh, len(batch.documents) > 0, state_weights(root))

    def sums(self) -> dict[str, torch.Tensor]:
        """What adds up over processes, float64 on the device by name; of maxima each process has a row of its own."""
        seen, weight = self.observation, float(self.counts)
        found: dict[str, torch.Tensor] = {}
        if seen.squares:
            found[OUTPUTS] = torch.stack(list(seen.squares.values())) * weight
            counted = [float(count) * weight for count in seen.elements.values()]
            found["elements"] = torch.tensor(counted, dtype=torch.float64, device=found[OUTPUTS].device)
        if maxima := self._maxima():
            own = torch.stack(list(maxima.values()))
            found[_MAXIMA] = own.new_zeros(self.mesh.size, len(own))
            found[_MAXIMA][self.mesh.rank] = own
        for layer, alive in seen.alive.items():
            # Processes that compute a layer together may have units of their own, each in a row of its own here.
            units = alive.new_zeros(self.mesh.tensor, len(alive), dtype=torch.float64)
            units[self.mesh.index("tensor")] = alive.double() * weight
            found[f"{DEAD}/{layer}"] = units
        for layer, router in seen.routers.items():
            found[f"{BUSIEST}/{layer}"] = router.chosen * weight
            if router.said is not None:
                found[f"{ENTROPY}/{layer}"] = router.said * weight
        return found

    def _maxima(self) -> dict[str, torch.Tensor]:
        """This process's part of what is largest, float64 scalars by figure."""
        routers = {index: one.largest for index, one in self.observation.routers.items() if one.largest is not None}
        seen = {
            f"{figure}/{layer_name(index)}": one.double() if self.counts else torch.full_like(one.double(), -torch.inf)
            for figure, layers in ((LOGITS, self.observation.largest_logit), (ROUTER_MAX, routers))
            for index, one in layers.items()
        }
        return seen | dict(self.weights)

    def figures(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The figures by name, of sums over all processes."""
        seen, found = self.observation, dict[str, float]()
        if OUTPUTS in sums:
            means = (sums[OUTPUTS] / sums["elements"]).sqrt().tolist()
            found |= {f"{OUTPUTS}/{layer_name(i)}": mean for i, mean in zip(seen.squares, means, strict=True)}
        if _MAXIMA in sums:
            largest = sums[_MAXIMA].amax(0).tolist()
            found |= {n: -one if "_min/" in n else one for n, one in zip(self._maxima(), largest, strict=True)}
        for layer in seen.alive:
            found[f"{DEAD}/{layer_name(layer)}"] = float((sums[f"{DEAD}/{layer}"] == 0).double().mean())
        for layer in seen.routers:
            found |= self._of_router(layer_name(layer), sums[f"{BUSIEST}/{layer}"], sums.get(f"{ENTROPY}/{layer}"))
        return found

    def _of_router(self, layer: str, chosen: torch.Tensor, said: torch.Tensor | None) -> dict[str, float]:
        """How even one router's choices are: 1 is even, for the busiest expert or process and for the entropy; and the
        mean of its logits."""
        experts, total = len(chosen), max(float(chosen.sum()), 1.0)
        found = {
            f"{BUSIEST}/{layer}": float(chosen.max()) * experts / total,
            f"{UNUSED}/{layer}": float((chosen == 0).double().mean()),
        }
        if said is not None:
            entropy, mean = (said / max(total / self.observation.per_token, 1.0)).tolist()
            found[f"{ENTROPY}/{layer}"] = entropy / math.log(experts) if experts > 1 else 1.0
            found[f"{ROUTER_MEAN}/{layer}"] = mean
        if (spread := self.mesh.expert) > 1:  # what each process of a group has to compute, added up over groups
            found[f"{PROCESS}/{layer}"] = float(chosen.view(spread, -1).sum(1).max()) * spread / total
        return found


@torch.no_grad()
def state_weights(root: CausalLM) -> dict[str, torch.Tensor]:
    """Of layers with a decaying state (gated delta rules, Mamba), this process's largest value, and the negative of its
    smallest one, of the decays' logarithms and of the norms' weights: float64 scalars by figure."""
    found: dict[str, torch.Tensor] = {}
    for index, block in enumerate(decoder_blocks(root.model, "logging.internals")):
        for module in block.modules():
            if not isinstance(getattr(module, STATES["decay_log"], None), nn.Parameter):
                continue
            for figure, name in STATES.items():
                part = getattr(module, name, None)
                weight = part if isinstance(part, nn.Parameter) else getattr(part, "weight", None)
                if weight is not None:
                    own = local(weight.detach()).double()
                    for end, values in (("min", -own), ("max", own)):
                        most = values.amax() if own.numel() else own.new_tensor(-torch.inf)  # no share is here
                        found[f"{figure}_{end}/{layer_name(index)}"] = most
    return found


def added_up(sums: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Sums of several kinds over all processes, on the CPU: one collective, and one copy from the device."""
    parts = [part for own in sums for part in own.values()]
    flat = torch.cat([part.reshape(-1) for part in parts])
    if dist.is_initialized():
        dist.all_reduce(flat)
    whole = iter(flat.cpu().split([part.numel() for part in parts]))
    return [{name: next(whole).view(part.shape) for name, part in own.items()} for own in sums]


# Which decoder layer diverges, by the figures that are recorded of all of them.

WATCHED = (WEIGHTS, GRADIENTS, UPDATES, OUTPUTS, LOGITS)
FACTOR = 4.0
"""How many times as large as before, and as the growth of the other layers, a figure of a diverging layer is."""
EARLIER, LEAST = 8, 3
"""Measurements of which the median is what a layer had before, and how few say nothing yet."""


@dataclass(frozen=True)
class Growth:
    """A figure of a layer that grows away from those of the others."""

    layer: str
    figure: str
    value: float | None
    """None where it is not finite."""
    before: float
    times: float
    others: float
    """How many times as large the same figure of the other layers has become, in the median."""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.layer} diverges: its {self.figure} is not finite, and was {self.before:.3g} before"
        return (
            f"{self.layer} diverges: its {self.figure} is {self.value:.3g}, {self.times:.1f} times what it was; "
            f"that of the other layers {self.others:.1f} times"
        )


class Divergence:
    """Compares each measurement of decoder layers with the earlier ones.

    A layer diverges where one of :data:`WATCHED` is at least :data:`FACTOR` times the median of its last
    :data:`EARLIER` measurements, and so many times what the median of the other layers has grown by; or where it alone
    of the layers is not finite. It is named once for each figure, until the figure is calm again; by their outputs the
    first such layer alone, since what it adds is in those of all later ones.
    """

    def __init__(self) -> None:
        self._past: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=EARLIER))
        self._named: set[str] = set()

    def note(self, figures: Mapping[str, float | None]) -> list[Growth]:
        """Take a measurement by the names of metrics.jsonl, None for what is not finite; returns what is new in it."""
        found = [growth for figure in WATCHED for growth in self._of_figure(figure, figures)]
        fresh = [one for one in found if f"{one.figure}/{one.layer}" not in self._named]
        self._named = {f"{one.figure}/{one.layer}" for one in found}
        for name, value in figures.items():
            if value is not None and name not in self._named:
                self._past[name].append(abs(value))
        return fresh

    def _of_figure(self, figure: str, figures: Mapping[str, float | None]) -> list[Growth]:
        start = f"{figure}/"
        values = {name[len(start) :]: value for name, value in figures.items() if name.startswith(f"{start}layers.")}
        before = {layer: self._before(f"{figure}/{layer}") for layer in values}
        known = {layer: past for layer, past in before.items() if past is not None}
        if lost := [layer for layer in known if values[layer] is None]:
            return [] if len(lost) == len(values) > 1 else [Growth(lost[0], figure, None, known[lost[0]], 0.0, 0.0)]
        times = {layer: _times(abs(values[layer] or 0.0), past) for layer, past in known.items()}
        found: list[Growth] = []
        for layer, grown in times.items():
            others = median([other for name, other in times.items() if name != layer] or [1.0])
            if grown >= FACTOR * max(others, 1.0):
                found.append(Growth(layer, figure, values[layer], known[layer], grown, others))
        return found[:1] if figure == OUTPUTS else found  # later layers add to the output of an earlier one

    def _before(self, name: str) -> float | None:
        """What a figure was; None where it was measured too seldom."""
        past = self._past.get(name, ())
        return median(past) if len(past) >= LEAST else None


def _times(value: float, before: float) -> float:
    """How many times as large; 1 of what has always been zero, such as an update that was left out."""
    return 1.0 if before == 0.0 else value / before
