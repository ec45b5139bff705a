"""Parts of files that go to a device: read ahead by threads, in blocks that are used again, and copied from there.

A mapped file is read a page at a time, by whoever copies it; what a device is given out of pageable memory its driver
copies once more. Threads that read into page-locked blocks keep a disk busy, or take a page cache at the speed of
memory, and a copy out of these takes a tenth of the reading.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

import torch

from tuner.errors import DataError
from tuner.model.mapped import InFile, mapped

BLOCK = 4 << 20
"""Bytes that are read at once."""
READERS = 4


@dataclass(frozen=True)
class _Landing:
    """A block that is being read, and where its elements go."""

    block: torch.Tensor
    dtype: torch.dtype
    target: torch.Tensor
    reading: Future[None]


class FileBlocks:
    """A context in which tensors on a device get what lies in files; they have it when it ends."""

    def __init__(self, device: torch.device) -> None:
        self._locked = device.type == "cuda"
        self._free: list[torch.Tensor] = []
        self._n_blocks = 0
        self._landing: deque[_Landing] = deque()
        self._files: dict[str, int] = {}
        self._contents: dict[str, torch.Tensor] = {}
        self._open = ExitStack()
        self._readers = ThreadPoolExecutor(READERS, "weights")

    def __enter__(self) -> FileBlocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            while self._landing and kind is None:
                self._land()
        finally:
            self._readers.shutdown(cancel_futures=True)
            self._open.close()

    def give(self, target: torch.Tensor, place: InFile, first: int = 0) -> None:
        """Give a contiguous tensor the elements of a place in a file, from the one with number ``first`` on.

        They are cast where they go. Raises DataError where the file ends before them.
        """
        size, flat = place.dtype.itemsize, target.view(-1)
        step = BLOCK // size
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            block = self._block()
            wanted = block.numpy()[: part.numel() * size].data
            read = partial(_read, self._file(place.path), place.path, place.start + (first + begin) * size, wanted)
            self._landing.append(_Landing(block, place.dtype, part, self._readers.submit(read)))

    def content(self, path: str) -> torch.Tensor:
        """The bytes of a file, mapped: for what does not lie end to end there. Raises OSError."""
        if path not in self._contents:
            self._contents[path] = mapped(path)
        return self._contents[path]

    def _block(self) -> torch.Tensor:
        """A free block. There are two for each reader, so that none waits for a copy to the device."""
        if not self._free:
            if self._n_blocks == 2 * READERS:
                self._land()
            else:
                self._n_blocks += 1
                self._free.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self._locked))
        return self._free.pop()

    def _land(self) -> None:
        """Copy the oldest block to its target. The copy is synchronous: the block is free when it returns."""
        landing = self._landing.popleft()
        landing.reading.result()
        count = landing.target.numel()
        with torch.no_grad():
            landing.target.copy_(landing.block.view(landing.dtype)[:count].to(landing.target.device))
        self._free.append(landing.block)

    def _file(self, path: str) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            self._open.callback(os.close, self._files[path])
        return self._files[path]


def _read(file: int, path: str, start: int, wanted: memoryview) -> None:
    """Fill memory with the bytes of a file from ``start`` on; a thread that reads leaves the interpreter to others."""
    done = 0
    while done < len(wanted):
        if not (count := os.preadv(file, [wanted[done:]], start + done)):
            raise DataError(f"{path}: it ends before byte {start + len(wanted)}: it was changed while it was read")
        done += count
