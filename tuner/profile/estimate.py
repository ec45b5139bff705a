"""How long a step takes, roughly: its arithmetic at the share of the device's rate that such steps reach."""

from __future__ import annotations

from tuner.config.recipe import Recipe
from tuner.model.flops import FROZEN, TRAINED, Flops
from tuner.profile.devices import Device
from tuner.profile.prediction import TimeEstimate
from tuner.profile.workload import Workload
from tuner.runtime.device import measured_peak
from tuner.runtime.dist import RankInfo

REACHED = 0.4
"""Share of the rate of large products: published full steps on H100 reach 33 to 46 % of the data sheet's."""
SMALL = 512
"""Tokens of a microbatch at which a device reaches half of what it reaches with many."""
AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of the forward pass of a layer that is computed again in its backward pass."""
LINKS = {"machine": 300e9, "network": 25e9}
"""Bytes a second that a process gets from others: of its own machine, and over the network."""


def estimate(
    recipe: Recipe, flops: Flops, device: Device, rank_info: RankInfo, work: Workload, total_steps: int | None
) -> TimeEstimate:
    """The time of a step of mean rows, from the first microbatch of its workload."""
    batch, tokens_per_row = work.batches.micro[0], work.tokens_per_row
    lengths, trained = batch.lengths, len(batch.trained_positions)
    train, tokens = recipe.train, sum(lengths)
    micro = max(1.0, train.global_batch_size / (train.micro_batch_size * rank_info.world_size))
    share = train.micro_batch_size * tokens_per_row / tokens
    parts = {name: value * share for name, value in flops.parts(lengths, trained).items()}
    again = AGAIN[train.gradient_checkpointing] * _forward_share(recipe) * _layers_share(recipe)
    parts["again"] = again * (parts["layers"] + parts["attention"])
    rate, basis = _rate(device, str(train.precision))
    reached = rate * REACHED * tokens * share / (tokens * share + SMALL)
    computing = micro * sum(parts.values()) / reached
    return TimeEstimate(
        flops={name: value * micro * rank_info.world_size for name, value in parts.items()},
        tokens_per_step=tokens_per_row * train.global_batch_size,
        step_s=max(computing, micro * _sending_s(recipe, flops, rank_info)),
        total_steps=total_steps,
        basis=basis,
    )


def _forward_share(recipe: Recipe) -> float:
    """The part of a layer's arithmetic that is its forward pass."""
    return 2 / (TRAINED if recipe.adapter.kind == "none" else FROZEN)


def _layers_share(recipe: Recipe) -> float:
    """The part of the layers that is computed again; all of them where they are counted out."""
    layers = recipe.train.gradient_checkpointing_layers
    return float(layers.share) if layers.unit == "%" else 1.0


def _rate(device: Device, precision: str) -> tuple[float, str]:
    if device.flops is None:
        return measured_peak(device.kind, precision), f"{REACHED:.0%} of a product measured here"
    rate = device.flops if precision == "bf16" else device.flops / 2
    return rate, f"{REACHED:.0%} of the data sheet's {rate / 1e12:,.0f} TFLOP/s"


def _sending_s(recipe: Recipe, flops: Flops, rank_info: RankInfo) -> float:
    """Seconds in which a microbatch's weights are gathered, unless computing hides it."""
    if rank_info.world_size == 1 or recipe.parallel.shard == "none":
        return 0.0
    near = recipe.parallel.shard == "hybrid" or rank_info.world_size == rank_info.local_world_size
    weights = (flops.products + flops.output) / (TRAINED if recipe.adapter.kind == "none" else FROZEN)
    passes = 2 if recipe.parallel.reshard_after_forward else 1
    size = weights * (4 if recipe.model.dtype == "fp32" else 2) * passes
    return size / LINKS["machine" if near else "network"]
