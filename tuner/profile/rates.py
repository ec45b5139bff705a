"""The time of a step by rates that were measured on a device, each for itself: none was fitted to a step.

`measured.json` has them: large products by shape, attention by the length of documents, a copy, and a thin product. A
step is made of products at the rate of the nearest shape; of attention; of LoRA's thin products, which move bytes; of
element-wise passes, which write each product's input and read its output once in each pass over a layer; and of what is
done to weights: casts, gradients that are added up, an update.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, exp, log
from pathlib import Path
from typing import Any

from tuner.model.flops import FORWARD, Product

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
    """DeviceRates of a device in bf16: operations and bytes a second."""

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


def seconds_of_products(
    rates: DeviceRates, products: Iterable[Product], tokens: float, trained: float, parts: int
) -> float:
    """Seconds of a micro-batch's products, forward and backward, and of the element-wise passes around them.

    Of so many ``tokens``, those that are ``trained`` go through the output layer; ``parts`` processes share the work.
    """
    found = 0.0
    for product in products:
        met = (trained if product.is_output else tokens) * product.share / parts
        passes, sides = product.cost / FORWARD, product.inputs + product.outputs
        moved = NUMBER * sides * met * passes
        if min(product.inputs, product.outputs) <= THIN:
            added = 2 * NUMBER * max(product.inputs, product.outputs) * met  # what it is added to is read and written
            each = moved / rates.thin + added / rates.copy
        else:
            operations = product.inputs * product.outputs * product.cost * met
            each = operations / rates.of_product(product, max(met, 1.0)) + moved / rates.copy
        found += product.copies * each
    return found


def seconds_of_attention(rates: DeviceRates, lengths: Sequence[int], operations: Callable[[int], float]) -> float:
    """Seconds of attention in documents of these lengths, of each of which the model asks so many operations."""
    return sum(IN_KERNEL * operations(length) / rates.of_attention(length) for length in lengths)


def seconds_of_weights(rates: DeviceRates, trained: float, micro_batches: float) -> float:
    """Seconds of what a step does to so many trained numbers, besides their products."""
    return trained * ((CAST + ADD) * micro_batches + UPDATE) / rates.copy
