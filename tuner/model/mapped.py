"""Tensors that lie in mapped files, as those read from safetensors files do: in which, and where.

A process that has only read a file shares its pages with all others that map it. What it writes there becomes pages of
its own, anonymous memory, which the kernel counts for every mapping: a tensor in one that has none is what the file
says, whatever has been done with the model since. Where the kernel does not tell (anything but Linux), no tensor is
said to lie in a file.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_MAPPINGS = Path("/proc/self/smaps")
_SAMPLE = 64
"""Bytes at the beginning, in the middle and at the end of a tensor that stand for it."""


@dataclass(frozen=True)
class InFile:
    """Where a contiguous tensor lies: ``start`` is in bytes, a multiple of an element's."""

    path: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, mapped: torch.Tensor) -> torch.Tensor:
        """The tensor, in the bytes of its file: a view."""
        return mapped[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Mapping:
    begin: int
    end: int
    offset: int
    path: str


def in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, InFile]:
    """Those of the tensors that lie in files whose pages this process has not changed, by name."""
    mappings = sorted(_unchanged(), key=lambda mapping: mapping.begin)
    begins = [mapping.begin for mapping in mappings]
    found = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            continue
        address = tensor.data_ptr()
        place = bisect_right(begins, address) - 1
        if place < 0 or address + tensor.nbytes > mappings[place].end:
            continue
        start = address - mappings[place].begin + mappings[place].offset
        if start % tensor.dtype.itemsize == 0:
            found[name] = InFile(mappings[place].path, start, tensor.dtype, tuple(tensor.shape))
    return found


def mapped(path: str) -> torch.Tensor:
    """The bytes of a file, uint8 ``[size]``, read as they are used. Raises OSError."""
    size = Path(path).stat().st_size
    try:
        return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(str(error)) from error


def sampled(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of a few bytes of each tensor, in their order: of other weights it is another one."""
    found = hashlib.sha256()
    for tensor in tensors:
        content = tensor.reshape(-1).view(torch.uint8)
        middle = len(content) // 2
        for part in (content[:_SAMPLE], content[middle : middle + _SAMPLE], content[-_SAMPLE:]):
            found.update(bytes(part.numpy()))
    return found.hexdigest()


def _unchanged() -> list[_Mapping]:
    """The mappings of files of which no page is this process's own."""
    found: dict[_Mapping, bool] = {}
    current: _Mapping | None = None
    lines: list[str] = []
    with suppress(OSError):
        lines = _MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        key, *values = line.split(maxsplit=5)
        if key.endswith(":"):
            if current is not None and key in {"Anonymous:", "Swap:"} and values[0] != "0":
                found[current] = False
            continue
        current = None
        if len(values) == 5 and values[4].startswith("/") and not values[4].endswith(" (deleted)"):  # noqa: PLR2004
            begin, end = (int(address, 16) for address in key.split("-"))
            current = _Mapping(begin, end, int(values[1], 16), values[4])
            found[current] = True
    return [mapping for mapping, is_unchanged in found.items() if is_unchanged]
