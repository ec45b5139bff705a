"""Weights that are made of several tensors of the files, such as those of all experts of a layer, left there unread;
and which tensors of a loaded model lie in mapped files.

transformers reads the tensors of each expert and puts them together: new memory, of the size of all experts. Where the
values are only to go to a device or to other processes, and where nothing but the place of each element changes, that
memory is reserved and never touched. Who needs values gets them from the files: a device in blocks, a process its part,
a proof those of the layers that it runs, a hash all in a row.

Where each element lies is what transformers says: how it takes a tensor apart again, for publishing, is done to one
without values, and each part of it is a view whose offset and strides tell its place. The first tensor of every kind
is read by transformers itself, and has to be what its pieces say.

Tensors that are read from safetensors files lie in mappings of these. A process that has only read a file shares its
pages with all others that map it. What it writes there becomes pages of its own, anonymous memory, which the kernel
counts for every mapping: a tensor in one that has none is what the file says, whatever has been done with the model
since. Where the kernel does not tell (anything but Linux), no tensor is said to lie in a file.
"""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tuner.model.stored import Stored, converted
from tuner.model.transformers_private import file_places, forget_renaming, keep_as_made, kept_in_float32
from tuner.runtime.parts import Box

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


class _Mapping(NamedTuple):
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


_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""By the format's names; weights of others are read as they always are."""
_ASIDE = "left_in_files"
"""The prefix that hides tensors from the loader: the model has no parameter of such a name."""


@dataclass(frozen=True)
class WeightPiece:
    """Elements of a tensor, a box of it, and where they lie end to end in a file."""

    box: Box
    """``at`` and ``offsets`` are the same: the part is the tensor."""
    place: InFile
    """Of the shape of the box."""

    def of(self, box: Box, content: torch.Tensor) -> torch.Tensor:
        """The elements of a box within this one, in the bytes of the file: a view."""
        offsets = tuple(here - begin for here, begin in zip(box.offsets, self.box.offsets, strict=True))
        return Box(offsets, box.sizes, offsets).of(self.place.of(content))

    def first(self, view: torch.Tensor) -> int:
        """The number, among the elements of the piece, of the one that such a view begins with."""
        return int(view.storage_offset()) - self.place.start // self.place.dtype.itemsize


class UnreadWeights:
    """The weights of a model that lie in pieces in its files, and are left there; a reader of weights
    (:class:`~tuner.model.transformers_private.WeightReader`) that takes none."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[WeightPiece, ...]] = {}
        """Of the model on the meta device, all that could be left; those that transformers reads are among them."""
        self._aside: frozenset[str] = frozenset()
        self._left: dict[int, _Left] = {}
        """By the address of their memory, which they keep."""
        self._contents: dict[str, torch.Tensor] = {}
        """Of the files: another one that takes the place of one later is none that was read."""

    def find(self, model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, str]:
        """See which weights of a model on the meta device can be left, given the tensors of its files.

        Returns what `from_pretrained` is to rename (``key_mapping``), empty where none can.
        """
        found = dict(_pieces(model, stored))
        kinds: dict[str, list[str]] = {}
        for name in found:
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        aside = {name for names in kinds.values() for name in names[1:]}
        sources = {source for name in aside for source in found[name].sources}
        if (pattern := _pattern(sources, stored)) is None:
            return {}
        self._names = {name: found[name].pieces for name in found}
        self._aside = frozenset(aside)
        return {pattern: _ASIDE}

    def begin(self, model: PreTrainedModel) -> None:
        """Have the loader draw nothing for what is left."""
        for name in self._aside:
            keep_as_made(model.get_submodule(name.rpartition(".")[0]))

    def wants(self, name: str) -> bool:
        """None of what is read."""
        return False

    def take(self, model: PreTrainedModel, name: str, weight: torch.Tensor, source: str | None) -> torch.Tensor | None:
        """Never called: it wants none."""
        raise RuntimeError(f"{name}: nothing was asked for")

    def end(self) -> None:
        """What is left was never there to be read."""

    def knows(self, name: str) -> bool:
        """Whether a name is what the loader was told for tensors that stay where they are."""
        return name.endswith(_ASIDE)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of the names that the loader found nothing for, and that were not left on purpose."""
        return [name for name in names if name not in self._aside]

    def settle(self, model: PreTrainedModel) -> bool:
        """Take note of what the loaded model has no values of; False where pieces are not what transformers read.

        The first element of each is NaN, so that whoever computes with weights that nobody read sees it.
        """
        for name, pieces in self._names.items():
            tensor, is_read = model.get_parameter(name).detach(), name not in self._aside
            for piece, there in self._values(pieces):
                if is_read and not torch.equal(there.to(tensor.dtype), piece.box.within(tensor)):
                    return False
            if not is_read:
                tensor.view(-1)[0] = torch.nan
            self._left[tensor.data_ptr()] = _Left(tensor, pieces, is_read)
        forget_renaming(model, _ASIDE)
        return True

    def pieces(self, tensor: torch.Tensor) -> tuple[WeightPiece, ...] | None:
        """Where the elements of a weight lie that is made of pieces; None of any other tensor."""
        left = self._left.get(tensor.data_ptr()) if tensor.device.type == "cpu" and not tensor.is_meta else None
        return None if left is None else left.pieces

    def in_order(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The elements of a tensor in their order, in parts: those of a weight that was left in its type."""
        pieces = self.pieces(tensor)
        if pieces is None or not all(_is_run(piece.box, tensor.shape) for piece in pieces):
            yield self.whole(tensor)
            return
        for _, there in self._values(pieces):
            yield there.to(tensor.dtype)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A weight that was left, read into memory of its own; any other tensor as it is."""
        pieces = self.pieces(tensor)
        return tensor if pieces is None else self._fill(torch.empty_like(tensor), pieces)

    @torch.no_grad()
    def read(self, model: nn.Module, left_out: Collection[nn.Module] = ()) -> None:
        """Give the weights of a model their values, but for those of the modules ``left_out``."""
        idle = {parameter for module in left_out for parameter in module.parameters()}
        for parameter in model.parameters():
            left = None if parameter in idle else self._left.get(parameter.data_ptr())
            if left is not None and not left.is_read:
                self._fill(left.tensor, left.pieces)
                left.is_read = True

    def _fill(self, tensor: torch.Tensor, pieces: Sequence[WeightPiece]) -> torch.Tensor:
        """Give a tensor the elements of its pieces, cast to its type."""
        for piece, there in self._values(pieces):
            piece.box.within(tensor).copy_(there)
        return tensor

    def _values(self, pieces: Sequence[WeightPiece]) -> Iterator[tuple[WeightPiece, torch.Tensor]]:
        """Each piece with its elements, a view of the file as it was when the model was read."""
        for piece in pieces:
            path = piece.place.path
            if path not in self._contents:
                self._contents[path] = mapped(path)
            yield piece, piece.place.of(self._contents[path])


@dataclass
class _Left:
    """A weight, and where its values are that it may not have yet."""

    tensor: torch.Tensor
    pieces: tuple[WeightPiece, ...]
    is_read: bool


class _Found(NamedTuple):
    pieces: tuple[WeightPiece, ...]
    sources: tuple[str, ...]
    """The names of the tensors in the files."""


def _pieces(model: PreTrainedModel, stored: Mapping[str, Stored]) -> Iterator[tuple[str, _Found]]:
    """The weights of a model that are made of several tensors of its files, in the order of the model.

    Only those of which every element has one place in the files, in the type of its tensor there.
    """
    kept = kept_in_float32(model)  # which the model has in another type once it is loaded
    parameters = {name: one for name, one in model.named_parameters() if name not in kept}
    made_of: dict[str, dict[str, str]] = {}
    for source, place in file_places(model, stored).items():
        if place.key in parameters and place.key != place.renamed:
            made_of.setdefault(place.key, {})[place.renamed] = source
    for name, parameter in parameters.items():
        sources = made_of.get(name, {})
        if len(sources) > 1 and (pieces := _pieces_of(model, name, parameter, sources, stored)) is not None:
            yield name, _Found(pieces, tuple(sources.values()))


def _pieces_of(
    model: PreTrainedModel, name: str, tensor: torch.Tensor, sources: Mapping[str, str], stored: Mapping[str, Stored]
) -> tuple[WeightPiece, ...] | None:
    """The pieces of a weight that is made of ``sources``, by their names once renamed."""
    with _Views():
        views = converted(model, name, tensor.detach())
    places = file_places(model, views)
    if {place.renamed for place in places.values()} != sources.keys():
        return None
    found = []
    for part, view in views.items():
        there, box = stored[sources[places[part].renamed]], _box(view, tensor)
        dtype = _TYPES.get(there.dtype)
        if box is None or there.shape != tuple(view.shape) or dtype is None or there.start % dtype.itemsize:
            return None
        found.append(WeightPiece(box, InFile(str(there.file.resolve()), there.start, dtype, box.sizes)))
    if sum(torch.Size(piece.box.sizes).numel() for piece in found) != tensor.numel():
        return None
    return tuple(sorted(found, key=lambda piece: piece.box.offsets))


class _Views(TorchFunctionMode):
    """Within, a tensor that is made contiguous stays the view that it is: there are no values to copy."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _box(view: torch.Tensor, whole: torch.Tensor) -> Box | None:
    """Which elements of a contiguous tensor a view of it has; None where they are no box, or in another order."""
    if StorageWeakRef(view.untyped_storage()) != StorageWeakRef(whole.untyped_storage()):
        return None  # it is memory of its own: its values were computed
    rest, offsets = view.storage_offset(), []
    for stride in whole.stride():
        offsets.append(rest // stride)
        rest %= stride
    sizes = [1] * whole.ndim
    dim = -1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        later = [at for at in range(dim + 1, whole.ndim) if whole.stride(at) == stride and whole.shape[at] >= size]
        if not later:
            return None
        dim = later[0]
        sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes), tuple(offsets))


def _pattern(names: Collection[str], stored: Collection[str]) -> str | None:
    """A regular expression for these names and for no other of the files'; None where there is none so simple.

    Of names that are alike but for their numbers the first number says which are meant, that of the layer.
    """
    alike: dict[str, set[str]] = {}
    for name in names:
        if (first := re.search(r"\d+", name)) is None:
            return None
        rest = re.sub(r"\\?\d+", r"\\d+", re.escape(name[first.end() :]))
        alike.setdefault(f"{re.escape(name[: first.start()])}%s{rest}", set()).add(first[0])
    found = "|".join(form % f"(?:{'|'.join(sorted(numbers))})" for form, numbers in sorted(alike.items()))
    if not found or {name for name in stored if re.fullmatch(found, name)} != set(names):
        return None
    return f"^(?:{found})$"


def _is_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box lie end to end in a contiguous tensor."""
    first = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(shape))
    return box.sizes[first + 1 :] == tuple(shape[first + 1 :])
