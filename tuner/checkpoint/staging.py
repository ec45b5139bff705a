"""Saving while training continues: a second copy of the state in host memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from tuner.errors import MachineError
from tuner.runtime.parts import local

ALIGNMENT = 64
"""Bytes; a cache line, and a multiple of every item size."""


@dataclass(frozen=True)
class Staged:
    """This process's part of every tensor of a state, in host memory, as it was when it was staged.

    Tensors that were staged in place are none of its copies: nobody may change them before they are ``written``.
    """

    tensors: dict[str, torch.Tensor]
    copied: torch.cuda.Event | None = None
    """Recorded after the copies where a device makes them on its own time."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set when who writes the state has read all of it, or has failed."""

    def wait(self) -> None:
        """Return once the copies are there. The host waits."""
        if self.copied is not None:
            self.copied.synchronize()


class Staging:
    """One block of host memory that every save uses again; page-locked where the tensors are on a CUDA device.

    Where the system refuses to lock so much (WSL, small containers), the block stays as it is, and `problem` says so: a
    copy into it is right too, but training waits for it. A staged state is overwritten by the next one: write it first.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._stream: torch.cuda.Stream | None = None
        self.problem: str | None = None
        """Why the block is not page-locked where it should be."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._block.numel()

    def reserve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have room for these tensors. Raises MachineError, naming the bytes, where there is not so much memory."""
        needed = staged_bytes(tensors)
        if needed <= self.nbytes:
            return
        self.release()
        try:
            block = torch.empty(needed, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:  # the first is torch's word for a full memory on the CPU
            raise MachineError(
                f"no memory for a copy of the state to save ({needed:,} bytes)",
                hint="write checkpoint.async_save: false",
            ) from error
        device = device_of(tensors)
        self.problem = None if device is None else _pin(block, device)
        self._pinned = device is not None and self.problem is None
        if not self._pinned:
            block.zero_()  # now, rather than page by page in the first save
        self._block = block

    def stage(self, tensors: Mapping[str, torch.Tensor], in_place: Collection[str] = ()) -> Staged:
        """Copy this process's part of each tensor. Those that are named in ``in_place``, on the host, are not copied.

        On CUDA the copies run during what is queued next: work that changes a tensor on the device must wait there for
        the event `copied` first. Who changes one that is in place must wait until it is `written`.
        """
        copied = {name: tensor for name, tensor in tensors.items() if name not in in_place}
        staged = self._copies(copied)
        return replace(staged, tensors={name: staged.tensors.get(name, local(tensors[name])) for name in tensors})

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        self.reserve(tensors)
        parts = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        views: dict[str, torch.Tensor] = {}
        start = 0
        for name, part in parts.items():
            size = part.numel() * part.element_size()
            views[name] = self._block[start : start + size].view(part.dtype).view(part.shape)
            start += _padded(part)
        on_device = device_of(parts)
        if on_device is None:
            for name, part in parts.items():
                views[name].copy_(part)
            return Staged(views)
        if self._stream is None:
            self._stream = torch.cuda.Stream(on_device)  # its own: the copies run beside the next step's kernels
        # The update that made these tensors may still be queued: the copies come after it.
        self._stream.wait_stream(torch.cuda.current_stream(on_device))
        with torch.cuda.stream(self._stream):
            for name, part in parts.items():
                views[name].copy_(part, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return Staged(views, copied)

    def release(self) -> None:
        """Give the memory back. No staged state may be used after it."""
        if self._pinned:
            from tuner.runtime.host import page_unlock

            page_unlock(self._block)
            self._pinned = False
        self._block = torch.empty(0, dtype=torch.uint8)


def staged_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the block that a copy of these tensors takes."""
    return sum(_padded(local(tensor)) for tensor in tensors.values())


def _padded(part: torch.Tensor) -> int:
    return -(-part.numel() * part.element_size() // ALIGNMENT) * ALIGNMENT


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The CUDA device on which this process holds its part of a state; None for one in the host's memory."""
    return next((part.device for part in map(local, tensors.values()) if part.is_cuda), None)


def _pin(block: torch.Tensor, device: torch.device) -> str | None:
    """Page-lock a block; what a person should know where CUDA refuses. ``device`` must be the calling thread's own."""
    from tuner.runtime.host import page_lock  # of CUDA alone

    code = page_lock(block, device)
    if code == 0:
        return None
    return (
        f"CUDA cannot page-lock {block.numel():,} bytes of host memory (error {code}): training waits a little longer "
        "for the copy of each save; raise the limit (ulimit -l, or the container's), or write checkpoint.async_save: "
        "false"
    )
