"""Copies between a device and a few buffers of the host's memory, each way on a stream of its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tuner.runtime import host
from tuner.runtime.page_lock import page_lock

Copies: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""What to write, and what to read for it."""


@dataclass
class Slot:
    """Buffers of the host that one bucket of parameters after the other passes through, flat.

    ``fetched`` is recorded after the newest copies from the device, ``returned`` after the newest ones back to it.
    """

    gradients: torch.Tensor
    weights: torch.Tensor
    fetched: torch.cuda.Event | None = None
    returned: torch.cuda.Event | None = None


class HostLink:
    """The way of a device's tensors to the host and back: on CUDA both ways at once, on a CPU copy after copy.

    In a turn, which begins with :meth:`begin` and ends with :meth:`end`, the host may touch a slot between :meth:`wait`
    and :meth:`give_back` alone. Where the system refuses to page-lock the buffers, they stay as they are, and
    ``problem`` says so.
    """

    def __init__(self, device: torch.device, count: int, elements: int, dtype: torch.dtype) -> None:
        self._device = device
        self._down: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._up: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.problem: str | None = None
        """Why copies wait for the host's work where they should not."""
        self.slots = [Slot(self._buffer(elements, dtype), self._buffer(elements, dtype)) for _ in range(count)]

    def begin(self) -> None:
        """What is fetched from now on is as it is after all that was queued on the device until now."""
        if self._down is not None:
            self._down.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, slot: Slot, copies: Copies) -> None:
        """Copy from the device into a slot, once what the slot holds has been copied out of it."""
        slot.fetched = _queued(self._down, copies, after=slot.returned)

    def wait(self, slot: Slot) -> None:
        """Return once a slot holds what was fetched for it. The host waits."""
        if slot.fetched is not None:
            slot.fetched.synchronize()

    def give_back(self, slot: Slot, copies: Copies) -> None:
        """Copy out of a slot to the device: what is there has been fetched before, and nobody there uses it."""
        slot.returned = _queued(self._up, copies)

    def end(self) -> None:
        """What is queued on the device from now on sees all that was given back."""
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def _buffer(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        block = torch.empty(elements, dtype=dtype)
        host.entered(block, "optimizer")
        if self._device.type != "cuda" or not elements:
            return block
        if code := page_lock(block, self._device):
            self.problem = (
                f"CUDA cannot page-lock {block.nbytes:,} bytes of host memory (error {code}): the optimizer's copies "
                "wait for its update; raise the limit (ulimit -l, or the container's)"
            )
        else:  # before its memory is somebody else's
            weakref.finalize(block, torch.cuda.cudart().cudaHostUnregister, block.data_ptr()).atexit = False
        return block


def _queued(
    stream: torch.cuda.Stream | None, copies: Copies, after: torch.cuda.Event | None = None
) -> torch.cuda.Event | None:
    """Queue copies on a stream, and an event that comes after them; made at once where there is no stream."""
    if stream is None:
        for to, source in copies:
            copy(to, source)
        return None
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        for to, source in copies:
            copy(to, source)
    event = torch.cuda.Event()
    event.record(stream)
    return event


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy between host and device on the current stream; on a CPU it is made at once."""
    to.copy_(source, non_blocking=True)
