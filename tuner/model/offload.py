"""The inputs of recomputed layers, in the host's memory from the forward pass until the backward pass wants them.

Recomputing keeps one input of every layer on the device: of a long row these are most of what is kept. Here each of
them is copied to page-locked memory of the host on a stream of its own, while the layers after it are computed, and is
brought back while the layer above it goes backward (Rhu et al. 2016, https://arxiv.org/abs/1602.08124; for inputs of
checkpoints ALST, https://arxiv.org/abs/2506.13996). At most :data:`IN_FLIGHT` inputs are on their way out, and those of
one layer on their way back. Copies change no bit, so gradients are those without. The host never waits: streams wait
for each other's events, and memory on the device is given back only after the wait, on the stream that it came from.

On a CPU the host's memory is the device's: the same code runs there and saves nothing.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tuner.errors import MachineError, RecipeError
from tuner.runtime.files import gib
from tuner.runtime.host import host_empty
from tuner.runtime.memory import host_memory
from tuner.runtime.torch_private import changes_in_place, storage_key

IN_FLIGHT = 2
"""Inputs that may be on their way to the host at one time; the device holds so many besides the layer's at work."""
BLOCK = 4 << 20
"""Bytes of a block of the host's memory. All have one size, so that rows of any length find theirs in the same pool;
a power of two, to which torch's allocator of page-locked memory would round up."""


class Lane:
    """The way between a device and the host; on a CPU a copy is made at once."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copy each pair's second tensor into its first, after all that the device was given so far; what is to be
        waited for, None where the copies are made."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, moved: Any) -> None:
        """Have the device's work from here on wait for copies."""


class CudaLane(Lane):
    """A stream of a CUDA device, for both directions: blocks of the host are used again in its order."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """As :meth:`Lane.copy`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        moved = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            moved.record(self._stream)
        return moved

    def wait(self, moved: torch.cuda.Event) -> None:
        """As :meth:`Lane.wait`."""
        torch.cuda.current_stream(self._device).wait_event(moved)


@dataclass(eq=False)
class _Place:
    """Where the bytes of one storage lie."""

    turn: int
    """The layer's call that it is an input of."""
    n_bytes: int
    device: torch.device
    blocks: list[torch.Tensor]
    here: torch.Tensor | None
    """uint8 ``[n_bytes]`` on the device, while it leaves and once it is coming back."""
    changes: int
    """How often it had been changed in place when it left."""
    moved: Any = None
    """What to wait for before ``here`` is used, if it is coming back, or given back, if it leaves."""
    comes_back: bool = False


@dataclass(eq=False)
class _Copy:
    """What the graph holds of a storage: with the last of its views the copy ends."""

    place: _Place


class _Saved(NamedTuple):
    """A tensor as a view of a storage that was moved."""

    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class HostInputs:
    """Moves inputs of a model's layers to the host and back; one for all layers, whose calls it numbers."""

    _lane: Lane | None = None
    _free: list[torch.Tensor] = field(default_factory=list)
    _leaving: deque[_Place] = field(default_factory=deque)
    _away: list[_Place] = field(default_factory=list)
    """All that the graph still wants, in the order of the forward pass."""
    _known: dict[int, tuple[weakref.ref[Any], weakref.ref[_Copy]]] = field(default_factory=dict)
    _given: set[int] = field(default_factory=set)
    _turn: int = 0
    n_blocks: int = 0
    """Blocks of the host's memory that were ever needed at one time; they are kept."""

    def run(self, forward: Callable[..., Any], first: str, *args: Any, **kwargs: Any) -> Any:
        """A layer's forward, of whose positional inputs those that it keeps for its backward pass go to the host.

        ``first`` is the name of the first of them, which some models give by name.
        """
        self._turn += 1
        if not args and first in kwargs:  # what is given by name is kept where nothing can take its place
            args = (kwargs.pop(first),)
        self._given = {storage_key(tensor.untyped_storage()) for tensor in args if _is_input(tensor)}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)
        finally:
            self._given = set()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """What the graph holds in the place of a tensor that a layer keeps."""
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._given:
            return tensor
        copy = self._known_copy(storage) or self._leave(tensor)
        return _Saved(copy, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        """The tensor again; what the layer before it kept begins to come back."""
        if not isinstance(saved, _Saved):
            return saved
        place = saved.copy.place
        if place.here is None:
            self._bring(place)
        here = place.here
        assert here is not None
        if place.comes_back:  # from here on the graph holds it, as it would hold the input itself
            self._way(place.device).wait(place.moved)
            place.here, place.moved, place.comes_back = None, None, False
        else:
            _require_unchanged(place)
        for before in self._layer_before(place):
            self._bring(before)
        return here.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _known_copy(self, storage: torch.UntypedStorage) -> _Copy | None:
        """The copy of a storage that is moved already: several views of it, or several layers, share one."""
        known = self._known.get(storage_key(storage))
        return known[1]() if known is not None and known[0]() is not None else None

    def _leave(self, tensor: torch.Tensor) -> _Copy:
        """Begin to copy the storage of a tensor to the host; the oldest that is on its way is let go of."""
        storage = tensor.untyped_storage()
        here = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
        place = _Place(self._turn, len(here), here.device, self._blocks(here), here, changes_in_place(here))
        place.moved = self._way(here.device).copy(list(block_pairs(place)))
        self._leaving.append(place)
        self._away.append(place)
        while len(self._leaving) > IN_FLIGHT:
            self._let_go(self._leaving.popleft())
        copy = _Copy(place)
        weakref.finalize(copy, self._end, place).atexit = False
        self._known[storage_key(storage)] = weakref.ref(storage), weakref.ref(copy)
        return copy

    def _let_go(self, place: _Place) -> None:
        """Give back a storage's memory on the device, once what comes next there is after the copy."""
        _require_unchanged(place)
        self._way(place.device).wait(place.moved)
        place.here = place.moved = None

    def _bring(self, place: _Place) -> None:
        """Begin to copy a storage back; its memory is the computing stream's own."""
        place.here = torch.empty(place.n_bytes, dtype=torch.uint8, device=place.device)
        place.moved = self._way(place.device).copy([(here, host) for host, here in block_pairs(place)])
        place.comes_back = True

    def _layer_before(self, place: _Place) -> list[_Place]:
        """What the layer that was called before this one has on the host alone."""
        turn = max((other.turn for other in self._away if other.turn < place.turn), default=0)
        return [other for other in self._away if other.turn == turn and other.here is None]

    def _end(self, place: _Place) -> None:
        """The graph wants a storage no more."""
        if place.here is not None:
            self._way(place.device).wait(place.moved)
        self._free += place.blocks
        self._away.remove(place)
        if place in self._leaving:
            self._leaving.remove(place)
        place.here, place.moved, place.blocks = None, None, []
        self._known = {key: known for key, known in self._known.items() if known[1]() is not None}

    def _way(self, device: torch.device) -> Lane:
        if self._lane is None:
            self._lane = CudaLane(device) if device.type == "cuda" else Lane()
        return self._lane

    def _blocks(self, here: torch.Tensor) -> list[torch.Tensor]:
        """Blocks of the host's memory for so many bytes. Raises MachineError where it has no room for them."""
        count = -(-len(here) // BLOCK)
        missing = count - len(self._free)
        if missing > 0:
            wanted, free = missing * BLOCK, host_memory()[1]
            if wanted > free:
                raise _no_room(self.n_blocks * BLOCK, f"{gib(wanted)} more are wanted, and {gib(free)} are free")
            try:
                made = [host_empty((BLOCK,), torch.uint8, "activations", here.device) for _ in range(missing)]
            except (RuntimeError, MemoryError) as error:
                raise _no_room(self.n_blocks * BLOCK, str(error).splitlines()[0]) from error
            self._free += made
            self.n_blocks += missing
        return [self._free.pop() for _ in range(count)]


def _is_input(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.is_floating_point() and not isinstance(given, torch.nn.Parameter)


def block_pairs(place: _Place) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block of the host with the bytes on the device that belong there."""
    assert place.here is not None
    for number, block in enumerate(place.blocks):
        part = place.here[number * BLOCK : (number + 1) * BLOCK]
        yield block[: len(part)], part


def _require_unchanged(place: _Place) -> None:
    assert place.here is not None
    if changes_in_place(place.here) != place.changes:
        raise RecipeError(
            "train.offload_activations: a layer changes its own input in place while that is copied to the host",
            hint="write offload_activations: false",
        )


def _no_room(held: int, why: str) -> MachineError:
    return MachineError(
        f"train.offload_activations: the host has no room for the layers' inputs, of which it holds {gib(held)}: {why}",
        hint="write offload_activations: false, or a smaller train.micro_batch_size",
    )
