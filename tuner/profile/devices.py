"""Devices that memory and time are predicted for: what drivers report, data sheets promise and measurements gave.

Memory is what ``nvidia-smi`` reports as the total of a card. Rates are dense bf16 products with float32 sums, without
sparsity, from NVIDIA's data sheets: H100 (DS-11133), H200 (DS-11516), A100 (DS-10031), L40S, L4, A10, and the
architecture papers of Ada, Ampere, Turing and Blackwell (GeForce, T4); B200 from the data sheet of DGX B200. Those of
fp16 are the same, those of fp8, where there are units for it, twice as high. A step reaches a part of them. Copies
between page-locked memory and a device reach four fifths of what PCIe x16 promises. The host's memory for each card is
an eighth of that of a DGX (B200, H200, H100 2 TB; A100 2 TB and 1 TB), and taken as 64 GiB for cards that are put into
machines of any kind.

`measured.json` has rates that were measured on a device, each for itself: none was fitted to a step. They are those of
large products by shape, of attention by the length of documents, of a copy, and of a thin product. A step is made of
products at the rate of the nearest shape; of attention; of LoRA's thin products, which move bytes; of element-wise
passes, which write each product's input and read its output once in each pass over a layer; and of what is done to
weights: casts, gradients that are added up, an update.
"""

import difflib
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, exp, log
from pathlib import Path
from typing import Any, Literal

from tuner.config.numbers import parse_bytes
from tuner.errors import RecipeError
from tuner.model.flops import FORWARD, Product
from tuner.runtime.device import ADA, AMPERE, DeviceFacts, device_facts
from tuner.runtime.memory import host_memory

MIB, GIB = 1 << 20, 1 << 30
PCIE = {3: 12e9, 4: 25e9, 5: 50e9}
"""Bytes a second each way that copies reach over 16 lanes, by the generation of PCIe."""
OTHER_HOST = 64 * GIB


@dataclass(frozen=True)
class Device:
    """One device: its memory in bytes and bf16 operations per second; None where only a measurement tells."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    flops: float | None
    shown: str
    generation: int = 0
    """As in the facts of a device that is here."""
    has_fp8: bool = False
    """As in the facts of a device that is here."""
    bf16_fast: bool = True
    """As in the facts of a device that is here."""
    host_link: float = PCIE[4]
    """Bytes a second each way that page-locked copies to and from the host's memory reach."""
    host_bytes: int = OTHER_HOST
    """Memory of the host for each such device."""

    def facts(self, threads: int = 1) -> DeviceFacts:
        """The device as a resolved recipe sees one that is here, all its memory free."""
        size = self.memory_bytes
        return DeviceFacts(self.kind, self.shown, size, size, self.bf16_fast, threads, self.generation, self.has_fp8)


@cache
def devices() -> dict[str, Device]:
    """The cards of data sheets (`devices.json`) by the name that ``--device`` takes."""
    cards = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
    return {card["name"]: _card(**card) for card in cards}


def _card(
    name: str, shown: str, memory_mib: int, bf16_tflops: float, capability: list[int], pcie: int, host_bytes: int
) -> Device:
    generation, has_fp8 = capability[0], tuple(capability) >= ADA
    size, rate, is_fast = memory_mib * MIB, bf16_tflops * 1e12, generation >= AMPERE
    return Device(name, "cuda", size, rate, shown, generation, has_fp8, is_fast, PCIE[pcie], host_bytes)


MEASURED = ("cpu",)
"""Kinds of device that predictions were held against, whatever its name; GPUs are in `measured.json`.

Predictions for all other devices are shown as unverified, and no command ends because of one.
"""


def is_verified(kind: str, name: str) -> bool:
    """Whether predictions were held against measurements on a device of this kind, or of this name."""
    return kind in MEASURED or stated_error(name) is not None


def present_device(kind: Literal["auto", "cuda", "cpu"]) -> Device:
    """The device that is here, with what is free of its memory; its rate, where the table has it."""
    facts = device_facts(kind)
    rate = data_sheet_rate(facts.name)
    known = next((device for device in devices().values() if facts.name.startswith(device.shown)), None)
    found = Device(facts.kind, facts.kind, facts.free_bytes, rate, facts.name, facts.generation, facts.has_fp8)
    link = found.host_link if known is None else known.host_link
    return replace(found, host_link=link, host_bytes=host_memory()[1], bf16_fast=facts.bf16_fast)


def data_sheet_rate(name: str) -> float | None:
    """Dense bf16 operations a second of a device by the name that its driver gives; None where the table lacks it."""
    known = [device for device in devices().values() if name.startswith(device.shown)]
    return max((device.flops or 0.0 for device in known), default=0.0) or None


def find_device(name: str) -> Device:
    """The device of a name. Raises RecipeError with the nearest one."""
    if name == "cpu":
        return present_device("cpu")
    if name not in devices():
        near = difflib.get_close_matches(name, devices(), n=1)
        raise RecipeError(
            f"--device {name}: no such device",
            hint=f"did you mean {near[0]}?" if near else f"there are cpu, {', '.join(devices())}",
        )
    return devices()[name]


def parse_processes(text: str) -> tuple[int, int]:
    """``8x8`` as machines and processes on each; a number alone is of one machine. Raises RecipeError."""
    machines, _, each = text.partition("x") if "x" in text else ("1", "x", text)
    for number in (machines, each):
        if not (number.isascii() and number.isdigit() and 1 <= int(number) <= 1 << 16):
            raise RecipeError(f"--processes {text}: no number of processes", hint="write 8, or 4x8 for four machines")
    return int(machines), int(each)


def parse_memory(option: str, text: str) -> int:
    """A size of memory in bytes. Raises RecipeError naming the option, also for a number without a unit."""
    if re.fullmatch(r"\s*[\d.]+\s*", text):
        unit = "GiB" if len(text.strip()) < len("1000000") else "B"
        raise RecipeError(f"{option} {text}: {text.strip()} what? write {text.strip()}{unit}")
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"{option} {text}: {error}", hint="write 24GiB or 16GB") from None


FILE = "measured.json"
THIN = 256
"""Rows or columns of a weight up to which its product is bound by the bytes that it moves."""
HALF_REACHED = 512
"""Tokens at which a product reaches half of what it reaches with many."""
NUMBER = 2
"""Bytes of a number in bf16."""
CAST, ADD, UPDATE = 6, 18, 32
"""Bytes for each trained number that is kept in float32: a micro-batch casts it (4 read, 2 written) and adds its
gradient to those before (2 read and 4 written of the cast, 8 read and 4 written of the sum); a step takes the norm of
the gradients (4), and AdamW reads weight, gradient and two moments and writes three of them (28)."""
IN_KERNEL = 7 / 6
"""Operations of attention's kernels for each that the model asks for: scores are made again in the backward pass."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device in bf16: operations and bytes a second."""

    device: str
    date: str
    tokens: int
    """Rows of the products that were measured."""
    products: Sequence[tuple[int, int, float]]
    """Large ones: the weight's sides, inputs first, and operations a second."""
    attention: Sequence[tuple[int, float]]
    """Tokens of each document, operations a second of forward and backward together; by length."""
    copy: float
    """Bytes that are read and written."""
    thin: float
    """Bytes that a product with a thin weight moves."""

    def of_product(self, product: Product, tokens: float) -> float:
        """Operations a second of a product of so many tokens: the nearest shape's, less where there are fewer."""
        wanted = product.inputs, product.outputs
        *_, rate = min(self.products, key=lambda one: sum(abs(log(a / b)) for a, b in zip(one, wanted, strict=False)))
        return rate * _reached(tokens) / _reached(self.tokens)

    def of_attention(self, length: float) -> float:
        """Operations a second in documents of a length: between those measured by its logarithm."""
        known = self.attention
        at = bisect_left([one for one, _ in known], length)
        if at in {0, len(known)}:
            return known[min(at, len(known) - 1)][1]
        (short, slow), (long, fast) = known[at - 1 : at + 1]
        part = log(length / short) / log(long / short)
        return exp(log(slow) + part * log(fast / slow))

    def seconds_of_products(self, products: Iterable[Product], tokens: float, trained: float, parts: int) -> float:
        """Seconds of a micro-batch's products, forward and backward, and of the element-wise passes around them.

        Of so many ``tokens``, those that are ``trained`` go through the output layer; ``parts`` processes share them.
        """
        found = 0.0
        for product in products:
            met = (trained if product.is_output else tokens) * product.share / parts
            passes, sides = product.cost / FORWARD, product.inputs + product.outputs
            moved = NUMBER * sides * met * passes
            if min(product.inputs, product.outputs) <= THIN:
                added = 2 * NUMBER * max(product.inputs, product.outputs) * met  # of what it is added to: read, written
                each = moved / self.thin + added / self.copy
            else:
                operations = product.inputs * product.outputs * product.cost * met
                each = operations / self.of_product(product, max(met, 1.0)) + moved / self.copy
            found += product.copies * each
        return found

    def seconds_of_attention(self, lengths: Sequence[int], operations: Callable[[int], float]) -> float:
        """Seconds of attention in documents of these lengths, of each of which the model asks so many operations."""
        return sum(IN_KERNEL * operations(length) / self.of_attention(length) for length in lengths)

    def seconds_of_weights(self, trained: float, micro_batches: float) -> float:
        """Seconds of what a step does to so many trained numbers, besides their products."""
        return trained * ((CAST + ADD) * micro_batches + UPDATE) / self.copy


def _reached(tokens: float) -> float:
    return tokens / (tokens + HALF_REACHED)


@dataclass(frozen=True)
class MeasuredStep:
    """A step of rows of 4,096 random ids, one document a row: what is predicted for it, and what was measured."""

    model: str
    trained: str
    """What is: ``full``, ``lora`` of rank 16 on all linear layers, or ``nf4``: that on a base of 4 bits."""
    precision: str
    rows: int
    micro_rows: int
    predicted_s: float
    predicted_gib: float
    """Of tensors at the peak."""
    measured_s: float | None
    """None where that is still to come: the prediction was written down before."""
    measured_gib: float | None

    def __str__(self) -> str:
        """In a few words."""
        return f"{self.model} {self.trained} {self.precision}, {self.rows} rows, {self.micro_rows} at a time"


@cache
def _table() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))
    return found


def steps_of(shown: str) -> list[MeasuredStep]:
    """The steps that were measured on a device by its driver's name, or are to be."""
    return [MeasuredStep(**step) for one in _table() if shown.startswith(one["device"]) for step in one["steps"]]


def stated_error(shown: str) -> float | None:
    """The largest error of a predicted peak on a device, in whole percent; None where none was measured."""
    errors = [abs(one.predicted_gib / one.measured_gib - 1) for one in steps_of(shown) if one.measured_gib is not None]
    return ceil(100 * max(errors)) / 100 if errors else None


@cache
def measured() -> tuple[DeviceRates, ...]:
    """The devices whose rates were measured."""
    return tuple(DeviceRates(one["device"], one["date"], **one["rates"]) for one in _table())


def rates_of(shown: str) -> DeviceRates | None:
    """Those of a device by its driver's name; None where they were not measured."""
    return next((rates for rates in measured() if shown.startswith(rates.device)), None)
