"""How long a step takes, estimated from its arithmetic and from what it sends; nothing runs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from tuner.config.recipe import Recipe
from tuner.model.flops import FROZEN, TRAINED, Flops
from tuner.profile.devices import Device
from tuner.profile.prediction import TimeEstimate
from tuner.profile.tracing import Trace
from tuner.profile.traffic import Traffic
from tuner.profile.workload import Workload
from tuner.runtime.device import measured_peak
from tuner.runtime.dist import RankInfo
from tuner.setup.settled import rows_at_once

REACHED = 0.4
"""Share of the rate of large products: published full steps on H100 reach 33 to 46 % of the data sheet's."""
HALF_REACHED = 512
"""Tokens of a microbatch at which a device reaches half of what it reaches with many."""
AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of the forward pass of a layer that is computed again in its backward pass."""
LINKS = {"machine": 300e9, "network": 25e9}
"""Bytes a second that a process gets from others: of its own machine, and over the network."""


@dataclass(frozen=True)
class Computing:
    """The arithmetic of a step of mean rows on one process: its seconds, and FLOPs of a microbatch by part."""

    seconds: float
    micro_batches: float
    flops: Mapping[str, float]
    basis: str


def computing(recipe: Recipe, flops: Flops, device: Device, rank_info: RankInfo, work: Workload) -> Computing:
    """Estimate the arithmetic of a step from the first microbatch of its workload; nothing is traced for it."""
    batch, tokens_per_row = work.batches.micro[0], work.tokens_per_row
    lengths, trained = batch.lengths, len(batch.trained_positions)
    train, tokens, rows = recipe.train, sum(lengths), rows_at_once(recipe)
    micro = max(1.0, train.global_batch_size / (rows * rank_info.world_size))
    share = rows * tokens_per_row / tokens
    parts = {name: value * share for name, value in flops.parts(lengths, trained).items()}
    again = AGAIN[train.gradient_checkpointing] * _forward_share(recipe) * _layers_share(recipe)
    parts["again"] = again * (parts["layers"] + parts["attention"])
    if work.extra_forwards:
        parts["extra"] = work.extra_forwards * flops.forward_of(lengths, trained) * share
    rate, basis = _rate(device, str(train.precision))
    reached = rate * REACHED * tokens * share / (tokens * share + HALF_REACHED)
    return Computing(micro * sum(parts.values()) / reached, micro, parts, basis)


def estimate(
    recipe: Recipe, trace: Trace, device: Device, rank_info: RankInfo, work: Workload, total_steps: int | None
) -> TimeEstimate:
    """The time of a step of mean rows: that of its arithmetic, at least that of its traffic."""
    computed = computing(recipe, trace.flops, device, rank_info, work)
    micro = computed.micro_batches
    traffic = _of_step(trace.traffic, ceil(micro))
    sent = traffic.gathered + traffic.reduced - traffic.far
    return TimeEstimate(
        flops={name: value * micro * rank_info.world_size for name, value in computed.flops.items()},
        tokens_per_step=work.tokens_per_row * recipe.train.global_batch_size,
        step_s=max(computed.seconds, sent / LINKS["machine"] + traffic.far / LINKS["network"]),
        total_steps=total_steps,
        basis=computed.basis,
        traffic=traffic,
    )


def _of_step(traced: Sequence[Traffic], n_micro: int) -> Traffic:
    """The traffic of so many microbatches: all are like the first but the last, which may reduce what they added up."""
    return traced[0] * (n_micro - 1) + traced[-1]


def _forward_share(recipe: Recipe) -> float:
    """The part of a layer's arithmetic that is its forward pass."""
    return 2 / (TRAINED if recipe.adapter.kind == "none" else FROZEN)


def _layers_share(recipe: Recipe) -> float:
    """The part of the layers that is computed again; all of them where they are counted out."""
    layers = recipe.train.gradient_checkpointing_layers
    return float(layers.share) if layers.unit == "%" else 1.0


def _rate(device: Device, precision: str) -> tuple[float, str]:
    if device.flops is None:
        return measured_peak(device.kind, precision), f"at {REACHED:.0%} of the rate of a matrix product measured here"
    rate = device.flops if precision == "bf16" else device.flops / 2
    return rate, f"at {REACHED:.0%} of the data sheet's {rate / 1e12:,.0f} TFLOP/s"
