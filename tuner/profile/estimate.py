"""How long a step takes, estimated from its arithmetic and from what it sends; nothing runs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd

from transformers import PretrainedConfig, PreTrainedModel

from tuner.config.optimizers import AdamwOptimizer
from tuner.model.flops import FROZEN, TRAINED, Flops, Product, experts_of_token, products_of
from tuner.profile.devices import HALF_REACHED, Device, rates_of
from tuner.profile.prediction import TimeEstimate
from tuner.profile.traffic import Traffic
from tuner.profile.workload import Workload
from tuner.runtime.device import measured_peak
from tuner.runtime.dist import RankInfo
from tuner.setup.settled import data_processes, rows_at_once, sharing
from tuner.setup.specs import StepSections, weight_parts

REACHED = 0.4
"""Share of the rate of large products: published full steps on H100 reach 33 to 46 % of the data sheet's."""
AGAIN = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Share of the forward pass of a layer that is computed again in its backward pass."""
OF_MLP = 2 / 3
"""Share of a layer's products that is its MLP's, which tiles compute again where the layer itself is not."""
UNPACKING = 300
"""Tokens whose products take as long as making a weight whole from 4 or 8 bits for one pass over it: some 5 bytes a
number are read and written, at memory's pace."""
FLOAT8_GAIN = 1.33
"""By what linear layers in fp8 are faster than in bf16: what makes of the 6,150 tokens a second of an 8B model on H100,
as torchtitan published it, the 7,690 with fp8, where four fifths of the arithmetic are theirs. Units promise 2."""
LINKS = {"machine": 300e9, "network": 25e9}
"""Bytes a second that a process gets from others: of its own machine, and over the network."""
HOST_MEMORY = 100e9
"""Bytes a second that the processors of a machine read and write in all."""
ADAM_ON_HOST, DOWN = 40, 8
"""Bytes that a host's AdamW reads and writes of its memory for each number, and those of them that a device sends."""


@dataclass(frozen=True)
class StepSetting:
    """Where a step is computed: on a device, by so many processes, of these rows."""

    device: Device
    rank_info: RankInfo
    work: Workload


@dataclass(frozen=True)
class Computing:
    """The arithmetic of a step of mean rows on one process: its seconds, and its FLOPs of a microbatch by part.

    The seconds hold what waits for copies to and from the host's memory.
    """

    seconds: float
    micro_batches: float
    flops: Mapping[str, float]
    basis: str


def computing(sections: StepSections, flops: Flops, sizes: Sizes, place: StepSetting) -> Computing:
    """Estimate the arithmetic of a step from the first microbatch of its workload; nothing is traced for it.

    Processes that share rows have equal parts of their arithmetic. A part of a matrix is computed at the pace of that
    part of the tokens: what a device needs many tokens for is products that are large.
    """
    work, device, rank_info = place.work, place.device, place.rank_info
    batch, tokens_per_row = work.batches.micro[0], work.tokens_per_row
    lengths, trained = batch.lengths, len(batch.trained_positions)
    train, rows = sections.train, rows_at_once(sections.train)
    micro = max(1.0, train.global_batch_size / (rows * data_processes(sections.parallel, rank_info.world_size)))
    shared = sharing(sections.parallel)
    tokens = rows * tokens_per_row
    share = tokens / sum(lengths) / shared
    parts = {name: value * share for name, value in flops.parts(lengths, trained).items()}
    forward = _forward_share(sections) * (parts["layers"] + parts["attention"])
    parts |= _repeated(sections, flops, parts)
    if work.extra_forwards:
        parts["extra"] = work.extra_forwards * flops.forward_of(lengths, trained) * share
    rates = None if train.precision not in {"bf16", "fp8"} else rates_of(device.shown)
    if rates is None:
        rate, basis = _rate(device, str(train.precision))
        pace = rate * REACHED * tokens / (tokens + HALF_REACHED * shared)
        weights_s = 0.0
    else:
        # What the model asks for takes as long as its parts; the rest is as much longer as it has more operations.
        basis = f"by rates that were measured on {rates.device} on {rates.date}"
        taken = rates.seconds_of_products(sizes.products, tokens, trained * tokens / sum(lengths), shared)
        taken += share * rates.seconds_of_attention(lengths, lambda one: flops.parts((one,), 0)["attention"])
        pace = sum(parts[name] for name in ("layers", "attention", "output")) / taken
        weights_s = rates.seconds_of_weights(sizes.trained / weight_parts(sections.parallel, rank_info), micro)
    arithmetic_s, forward_s = _operations(sections, device, parts) / pace, forward / pace
    copied_s, (up_s, again_s, down_s) = 0.0, _shards_s(sections, sizes, place)
    if train.offload_activations is True:
        own = tokens / sections.parallel.sequence
        each = 4 if sections.model.dtype == "fp32" else 2  # what goes from layer to layer is as the weights are
        copied_s = each * sizes.layers * sizes.width * own / device.host_link
    # What is kept goes down in the forward pass, and comes up in the backward pass; the link carries both ways at once.
    each_s = max(forward_s, copied_s, up_s) + max(arithmetic_s - forward_s, copied_s + again_s, down_s)
    return Computing(micro * each_s + weights_s + _host_step_s(sections, sizes, place), micro, parts, basis)


def _operations(sections: StepSections, device: Device, parts: Mapping[str, float]) -> float:
    """Operations of a microbatch, those in fp8 counted as the fewer in bf16 that take as long."""
    found = sum(parts.values())
    if sections.train.precision == "fp8" and device.kind == "cuda":
        again = AGAIN[sections.train.gradient_checkpointing] * _forward_share(sections) * _layers_share(sections)
        found -= (1 - 1 / FLOAT8_GAIN) * (1 + again) * parts["layers"]
    return found


def _repeated(sections: StepSections, flops: Flops, parts: Mapping[str, float]) -> dict[str, float]:
    """Operations of a microbatch that the model does not ask for: what is computed again, and weights made whole."""
    level, layers = sections.train.gradient_checkpointing, parts["layers"] + parts["attention"]
    again = AGAIN[level] * _forward_share(sections) * _layers_share(sections) * layers
    if sections.train.tiled_mlp is True and level != "full":
        again += OF_MLP * _forward_share(sections) * parts["layers"]
    found = {"again": again}
    if sections.model.quantize != "none":
        found["unpacking"] = UNPACKING * (2 + AGAIN[level]) * flops.forward_products / sections.parallel.tensor
    return found


def _shards_s(sections: StepSections, sizes: Sizes, place: StepSetting) -> tuple[float, float, float]:
    """Seconds of copies of shards that lie on the host, in a micro-batch: of all weights up to the device in the
    forward pass and again in the backward pass, and of gradients in float32 down."""
    parallel = sections.parallel
    if parallel.offload == "none" or place.device.kind == "cpu":
        return 0.0, 0.0, 0.0
    each_s = 1 / (weight_parts(parallel, place.rank_info) * place.device.host_link)
    up_s = sizes.weight_bytes * each_s
    return up_s, up_s * parallel.reshard_after_forward, 4 * sizes.trained * each_s


def _host_step_s(sections: StepSections, sizes: Sizes, place: StepSetting) -> float:
    """Seconds of an update on the host: gradients and weights come down, its arithmetic, and weights go up.

    With shards that lie there its arithmetic alone.
    """
    optimizer, has_shards = sections.optimizer, sections.parallel.offload == "host"
    if not has_shards and (not isinstance(optimizer, AdamwOptimizer) or optimizer.offload == "none"):
        return 0.0
    own, local = sizes.trained / weight_parts(sections.parallel, place.rank_info), place.rank_info.local_world_size
    return max((not has_shards) * DOWN * own / place.device.host_link, ADAM_ON_HOST * own * local / HOST_MEMORY)


def estimate(
    sections: StepSections, flops: Flops, sizes: Sizes, traced: Sequence[Traffic], place: StepSetting,
    total_steps: int | None,
) -> TimeEstimate:
    """The time of a step of mean rows: that of its arithmetic, at least that of its weights' traffic, and exchanges."""
    computed = computing(sections, flops, sizes, place)
    micro = computed.micro_batches
    # all micro-batches are like the first but the last, which may reduce what they added up
    traffic = traced[0] * (ceil(micro) - 1) + traced[-1]
    return TimeEstimate(
        flops={name: value * micro * place.rank_info.world_size for name, value in computed.flops.items()},
        tokens_per_step=place.work.tokens_per_row * sections.train.global_batch_size,
        step_s=seconds_of(computed.seconds, traffic), total_steps=total_steps, basis=computed.basis, traffic=traffic,
        busy_s=computed.seconds,
    )


def seconds_of(busy_s: float, traffic: Traffic) -> float:
    """The time of a step that computes so long, sends weights meanwhile, and waits for what it exchanges."""
    sent = traffic.gathered + traffic.reduced
    return max(busy_s, _sending_s(sent, traffic.far)) + _sending_s(traffic.exchanged, traffic.exchanged_far)


def _sending_s(sent: int, far: int) -> float:
    """Seconds for so many bytes, those included that cross the network."""
    return (sent - far) / LINKS["machine"] + far / LINKS["network"]


def _forward_share(sections: StepSections) -> float:
    """The part of a layer's arithmetic that is its forward pass."""
    return 2 / (TRAINED if sections.adapter.kind == "none" else FROZEN)


def _layers_share(sections: StepSections) -> float:
    """The part of the layers that is computed again; all of them where they are counted out."""
    layers = sections.train.gradient_checkpointing_layers
    return float(layers.share) if layers.unit == "%" else 1.0


def _rate(device: Device, precision: str) -> tuple[float, str]:
    if device.flops is None:
        said = f"at {REACHED:.0%} of the rate of a matrix product measured here"
        return measured_peak(device.kind, precision, 0), said
    rate = device.flops / 2 if precision == "fp32" else device.flops
    faster = f" for bf16, linear layers {FLOAT8_GAIN} times as fast in fp8" if precision == "fp8" else ""
    return rate, f"at {REACHED:.0%} of the data sheet's {rate / 1e12:,.0f} TFLOP/s{faster}"


PASSES = 2
"""Forward and backward, each of which sends as much."""
BLOCKS = 2
"""Of a layer: attention and MLP."""
PIECES = 2
"""A sum is made of parts that are sent once, and sent once more when they are whole: a ring's all-reduce."""


def least_exchanged(sections: StepSections, config: PretrainedConfig, place: StepSetting) -> Traffic:
    """Bytes that one process sends in a step of mean rows, at least: of the layers alone, none of them recomputed.

    With ``tensor``, the sum of what each block gives (Shoeybi et al. 2019, section 3); with ``sequence``, queries,
    keys, values and outputs of each attention (Jacobs et al. 2023, section 3.2); with ``expert``, each token to its
    experts and back.
    """
    text, parallel = config.get_text_config(), sections.parallel
    layers, width = int(getattr(text, "num_hidden_layers", 0)), int(getattr(text, "hidden_size", 0))
    rows = sections.train.global_batch_size / data_processes(sections.parallel, place.rank_info.world_size)
    tokens = rows * place.work.tokens_per_row / parallel.sequence
    numbers = PIECES * BLOCKS * width * _others(parallel.tensor)
    numbers += _of_attention(text, parallel.sequence) * _others(parallel.sequence) / parallel.tensor
    numbers += 2 * experts_of_token(text) * width * _others(parallel.expert)
    each = 4 if sections.train.precision == "fp32" else 2  # bytes of a number that layers give each other
    sent = round(numbers * tokens * layers * PASSES * each)
    group = parallel.tensor * max(parallel.sequence, parallel.expert)
    return Traffic(exchanged=sent, exchanged_far=sent * (group > place.rank_info.local_world_size))


def _others(size: int) -> float:
    """The share of what a process has that is for the others of its group."""
    return (size - 1) / size


def _of_attention(config: PretrainedConfig, size: int) -> int:
    """Numbers of a token that change places around attention: its queries and outputs, keys and values.

    Key heads that do not divide over the processes are repeated until they do.
    """
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    channels = getattr(config, "head_dim", None) or (int(getattr(config, "hidden_size", 0)) // heads if heads else 0)
    return 2 * (heads + key_heads * (size // gcd(key_heads, size))) * int(channels)


@dataclass(frozen=True)
class Sizes:
    """What of a model is computed and copied: counts of the whole model."""

    layers: int
    width: int
    trained: int
    products: tuple[Product, ...]
    weight_bytes: int = 0

    @staticmethod
    def of(model: PreTrainedModel) -> Sizes:
        """Those of a model as it is trained, whole or sharded, with storage or without."""
        config = model.config.get_text_config()
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        layers, width = int(getattr(config, "num_hidden_layers", 0)), int(getattr(config, "hidden_size", 0))
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        return Sizes(layers, width, trained, tuple(products_of(model)), weight_bytes)
