"""What an export must hold, recomputed by other means than those that wrote it.

The writer reads the chunks of a checkpoint block by block and merges adapters in float32, in peft's modules' names and
scales. Here the checkpoint is read as a resumed run reads it, what belongs to a weight is found by the names in its
index, and W + s·B·A is computed in float64 with the scale that the adapter's facts give. What is written has to be that
number rounded once to its type; float32 sums may differ from it by what their length allows, and by no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tuner.checkpoint.load import read_tensors
from tuner.errors import VerificationError
from tuner.export.frozen import Frozen
from tuner.export.quantized import quantized_base
from tuner.export.source import Source
from tuner.export.tensors import OpenFiles
from tuner.export.weights import lora_spec, some
from tuner.model.adapter import ADAPTER
from tuner.model.experts import LORA_A, LORA_B
from tuner.model.published import Published, published
from tuner.model.transformers_private import kept_in_float32

BLOCK_ELEMENTS = 1 << 20
"""Numbers that are compared at a time, each of them several times in float64."""
EPSILON = 2.0**-24
"""Of one float32 rounding, relative."""


@dataclass(frozen=True)
class Part:
    """Rows of a tensor from ``start`` on, float64; float32 sums may be off by ``slack``, None where nothing is summed.
    """

    start: int
    values: torch.Tensor
    slack: torch.Tensor | None = None

    def wrong(self, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Which numbers are not these, rounded once to a type; ``found`` has it, or a wider one."""
        dtype = dtype if self.values.is_floating_point() else self.values.dtype
        if self.slack is None:
            return found.double() != self.values.to(dtype).double()
        low, high = (self.values - self.slack).to(dtype).double(), (self.values + self.slack).to(dtype).double()
        return ~((found.double() >= low) & (found.double() <= high))


@dataclass(frozen=True)
class _LowRank:
    """B ``[out, r]``, A ``[r, in]`` and DoRA's lengths ``[out]`` in float64, and what B·A is multiplied by."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    length: torch.Tensor | None = None

    def added_to(self, weight: torch.Tensor, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of these rows of a weight ``[out, in]`` with the adapter, and how far float32 may be from it."""
        b, rank = self.b[rows], len(self.a)
        merged = weight + self.scale * (b @ self.a)
        largest = abs(self.scale) * torch.outer(b.norm(dim=1), self.a.norm(dim=0))
        slack = EPSILON * ((rank + 4) * largest + 4 * weight.abs())
        if self.length is None:
            return merged, slack
        factor = (self.length[rows] / merged.norm(dim=1))[:, None]
        slack = slack + slack.norm(dim=1, keepdim=True) / merged.norm(dim=1, keepdim=True) * merged.abs()
        return merged * factor, factor.abs() * (slack + EPSILON * (math.sqrt(weight.shape[1]) + 8) * merged.abs())


class Expected:
    """Every tensor of the plain model as it was trained, by its name there."""

    def __init__(self, source: Source, plain: PreTrainedModel, files: OpenFiles, original: bool = False) -> None:
        """``original`` takes the weights of a quantised base as they were before that. Raises DataError."""
        self._source, self._plain, self._entries = source, plain, published(plain)
        self._keys = {
            key.removeprefix(source.prefix).replace(".base_layer.", "."): key
            for key in source.checkpoint.index()
            if key.startswith(source.prefix)
        }
        self._used = set[str]()
        base = None if original else quantized_base(source, plain)
        left = [entry for entry in self._entries if entry.name not in self._keys]
        self._frozen = Frozen(source, plain, files, left, base)
        self._exact = set(kept_in_float32(plain))
        self._scale = 0.0 if source.adapter is None else lora_spec(source.adapter).scale

    def tensors(self) -> Iterator[tuple[str, Iterator[Part]]]:
        """Each by its name, in parts that follow one another.

        Raises VerificationError where the checkpoint holds what belongs to none of them.
        """
        for entry in self._entries:
            yield entry.name, self._parts(entry)
        if left := sorted(self._keys.keys() - self._used):
            raise VerificationError(f"trained, and in no tensor of the export: {some(left)}; nothing was published")

    def type_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The type in which a floating tensor is written: some are float32 whatever the others are."""
        return torch.float32 if name in self._exact else dtype

    def trained(self, name: str) -> torch.Tensor:
        """A trained tensor whole, by its name in the model with its adapter; the mean where one is exported."""
        self._used.add(name)
        found = [next(read_tensors(info, [self._keys[name]]))[1] for info in self._source.checkpoints]
        if not self._source.averaged:
            return found[0]
        return torch.stack([each.double() for each in found]).mean(0).float()

    def _parts(self, entry: Published) -> Iterator[Part]:
        owner, _, last = entry.name.rpartition(".")
        if f"{entry.name}{LORA_A}" in self._keys:
            yield from self._experts(entry, bool(getattr(self._plain.get_submodule(owner), "is_transposed", False)))
            return
        is_weight = last == "weight"
        adapter = self._low_rank(owner) if is_weight else None
        if adapter is not None and type(self._plain.get_submodule(owner)).__name__ == "Conv1D":  # [in, out]
            whole = torch.cat([rows for _, rows in self._rows(entry)])
            values, slack = adapter.added_to(whole.double().T)
            yield Part(0, values.T, slack.T)
            return
        rows_of_new = f"{owner}.new_rows"
        new = self.trained(rows_of_new).double() if is_weight and rows_of_new in self._keys else None
        for start, rows in self._rows(entry):
            if adapter is not None:
                values, slack = adapter.added_to(rows.double(), slice(start, start + len(rows)))
                yield Part(start, values, slack)
            elif new is not None:
                yield Part(start, _with_new(rows.double(), new, start, self._source.new_ids.start))
            else:
                yield Part(start, rows)

    def _rows(self, entry: Published) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor without its adapter: the first row of each block, and the block."""
        if entry.name in self._keys:
            whole = self.trained(entry.name)
        else:
            frozen = self._frozen.tensor(entry) or self._frozen.assembled(entry)
            at = 0
            for block in frozen.blocks(frozen.dtype):
                yield at, block
                at += len(block) if block.ndim else 1
            return
        if not whole.ndim:
            yield 0, whole
            return
        step = max(1, BLOCK_ELEMENTS // max(1, math.prod(whole.shape[1:])))
        for start in range(0, len(whole), step):
            yield start, whole[start : start + step]

    def _low_rank(self, owner: str) -> _LowRank | None:
        """The adapter of a linear layer; None where it has none."""
        a, b = (f"{owner}.lora_{which}.{ADAPTER}.weight" for which in "AB")
        if a not in self._keys:
            return None
        length = f"{owner}.lora_magnitude_vector.{ADAPTER}.weight"
        lengths = self.trained(length).double() if length in self._keys else None
        return _LowRank(self.trained(a).double(), self.trained(b).double(), self._scale, lengths)

    def _experts(self, entry: Published, is_transposed: bool) -> Iterator[Part]:
        """The weights of all experts ``[E, ...]``, one by one."""
        a, b = (self.trained(f"{entry.name}{end}").double() for end in (LORA_A, LORA_B))
        for start, block in self._rows(entry):
            for number, weight in enumerate(block.double(), start):
                one = _LowRank(a[number], b[number], self._scale)
                values, slack = one.added_to(weight.T if is_transposed else weight)
                values, slack = (values.T, slack.T) if is_transposed else (values, slack)
                yield Part(number, values[None], slack[None])


def _with_new(rows: torch.Tensor, new: torch.Tensor, start: int, first: int) -> torch.Tensor:
    """Rows of an embedding from ``start`` on, of which those of new tokens, from ``first`` on, were trained apart."""
    low, high = max(start, first), min(start + len(rows), first + len(new))
    if low < high:
        rows = torch.cat([rows[: low - start], new[low - first : high - first], rows[high - start :]])
    return rows

