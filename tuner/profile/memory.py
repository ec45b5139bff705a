"""Exact tensor memory of real steps: every storage from its allocation to its end, replayed to find the peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARTS = ("weights", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes alive at the moment of the peak: all of them, and by part (parts add up to the peak)."""

    peak: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class _Event:
    storage: int  # serial number: a freed storage's is never used again
    delta: int  # bytes; negative at its end


class StorageLog(TorchDispatchMode):
    """Logs the life of every tensor storage that operations make on one device while the mode is on.

    Activations are storages made in forward and alive at the peak; `other` are those made anywhere else, such as the
    gradients of activations. Scratch space inside a kernel has no storage and is not seen. Weights that FSDP2 gathers
    count as weights while they are there; it frees them by resizing their storage to nothing, which no operation tells
    of: with ``resized`` the sizes of all living storages are read again after each operation.
    """

    def __init__(self, device: torch.device, resized: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._resized = resized
        self._events: list[_Event] = []
        self._part: dict[int, str] = {}
        self._living: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # id(storage) -> reference, serial, bytes
        self._serial = 0
        self.phase = "other"

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and log what it returned."""
        if self._resized:
            self._read_sizes()
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("fsdp.split_with_sizes_copy"):
            self.assign((kwargs or {})["out"], "weights")
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._log(leaf, self.phase)
        return result

    def assign(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count these tensors' storages, made before or now, to one part."""
        for tensor in tensors:
            serial = self._log(tensor, part)
            if serial is not None:
                self._part[serial] = part

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Storages made inside the block belong to `part` unless they are assigned to another."""
        before, self.phase = self.phase, part
        try:
            yield
        finally:
            self.phase = before

    def peak(self) -> MemoryPeak:
        """Replay the log: the largest sum of living storages and what it was made of."""
        now = dict.fromkeys(PARTS, 0)
        total = best = 0
        parts = dict(now)
        for event in list(self._events):
            now[self._part[event.storage]] += event.delta
            total += event.delta
            if total > best:
                best, parts = total, dict(now)
        return MemoryPeak(best, parts)

    def _log(self, tensor: torch.Tensor, part: str) -> int | None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != self._device:
            return None
        storage = local.untyped_storage()
        size, key = storage.nbytes(), id(storage)
        known = self._living.get(key)
        if known is not None and known[0]() is storage:
            if known[2] != size:
                self._events.append(_Event(known[1], size - known[2]))
                self._living[key] = (known[0], known[1], size)
            return known[1]
        self._serial += 1
        serial = self._serial
        reference = weakref.ref(storage, lambda _: self._ended(key, serial))
        self._living[key] = (reference, serial, size)
        self._part[serial] = part
        self._events.append(_Event(serial, size))
        return serial

    def _read_sizes(self) -> None:
        for reference, serial, size in list(self._living.values()):
            storage = reference()
            if storage is not None and (now := storage.nbytes()) != size:
                self._events.append(_Event(serial, now - size))
                self._living[id(storage)] = (reference, serial, now)

    def _ended(self, key: int, serial: int) -> None:
        known = self._living.get(key)
        if known is not None and known[1] == serial:
            del self._living[key]
            self._events.append(_Event(serial, -known[2]))


def model_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def gradient_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
