"""What the axes of a mesh make a process move, operation by operation: over links, and in its device's own memory.

It works on any tensors, those without memory included, and under any process group: torch's fake one stands for as many
processes as are wanted. ``tools/traffic_campaign.py`` makes a table of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

MATRIX = 2
"""Dimensions of the parameters whose conversions count: others are too small to matter."""
_COPIES = {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"}
"""How FSDP2 puts shards into the buffer of a collective, takes parameters out of one, and puts gradients into one."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one process moves because it is one of several.

    Over links: ``gathered`` is what it receives of other processes' weights, ``reduced`` what it sends of sums of
    gradients; ``far`` is what of both crosses the network. Rows of an embedding that are looked up in shards are summed
    on their way there, and their gradients gathered on the way back: as many bytes under each name.

    ``exchanged`` is what it sends of activations and their gradients, among processes that compute a layer or a row
    together or send each other tokens for their experts, and ``exchanged_far`` what of that crosses the network: while
    weights travel ahead, what is exchanged is waited for. In its own memory, reading and writing: ``copied`` is what
    goes into and out of the buffers of collectives, ``converted`` are weights and their gradients that change type.
    """

    gathered: int = 0
    reduced: int = 0
    far: int = 0
    exchanged: int = 0
    exchanged_far: int = 0
    copied: int = 0
    converted: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{key: value + getattr(other, key) for key, value in asdict(self).items()})

    def __mul__(self, times: int) -> Traffic:
        return Traffic(**{key: value * times for key, value in asdict(self).items()})

    def as_exchanged(self) -> Traffic:
        """What collectives send, as that of activations."""
        sent = self.exchanged + self.gathered + self.reduced
        return Traffic(exchanged=sent, exchanged_far=self.exchanged_far + self.far)


class TrafficCounter:
    """Adds up the traffic of each micro-batch, and apart from them that of the optimizer.

    Shapes are those of the parameters, whole and sharded, whose conversions count. Processes whose ranks are
    ``local_size`` or more apart are on different machines. ``exchanging`` are names of groups whose collectives are
    about activations; those that send each process something else are so in any group.
    """

    def __init__(self, shapes: Iterable[torch.Size], local_size: int, exchanging: Collection[str] = ()) -> None:
        self.micro: list[Traffic] = []
        self.optimizer = Traffic()
        self._shapes = {tuple(shape) for shape in shapes if len(shape) == MATRIX}
        self._local_size, self._part, self._times = local_size, "", 1
        self._exchanging = frozenset(exchanging)

    def begin(self, part: str) -> None:
        """A part of the step begins, named as :func:`tuner.runtime.phase.enter_part` names it."""
        self._part = part
        if part == "forward":
            self.micro.append(Traffic())

    def standing_for(self, times: int) -> None:
        """What comes from here on is there so many times, of which one is traced."""
        self._times = times

    def count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Enter an operation that is about to run, or just ran."""
        name = func.name()
        if (collective := _COLLECTIVES.get(name)) is not None:
            found = collective(args, self._is_far(args))
            self._add(found.as_exchanged() if _group(args).group_name in self._exchanging else found)
        elif name in _COPIES:
            self._add(Traffic(copied=_copied(args, kwargs)))
        elif name == "aten::_to_copy":
            self._add(Traffic(converted=self._converted(args[0], kwargs.get("dtype"))))
        elif name == "aten::_foreach_copy_":
            pairs = zip(args[0], args[1], strict=True)
            self._add(Traffic(converted=sum(_bytes([a, b]) for a, b in pairs if a.dtype != b.dtype)))

    def _converted(self, source: torch.Tensor, dtype: torch.dtype | None) -> int:
        if dtype is None or dtype == source.dtype or tuple(source.shape) not in self._shapes:
            return 0
        return source.numel() * (source.element_size() + dtype.itemsize)

    def _is_far(self, args: tuple[Any, ...]) -> bool:
        ranks = dist.get_process_group_ranks(_group(args))
        return max(ranks) - min(ranks) >= self._local_size

    def _add(self, found: Traffic) -> None:
        if self._part in {"forward", "backward"}:
            self.micro[-1] += found * self._times
        else:
            self.optimizer += found


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group of a collective's arguments: the first of its script objects that is one."""
    for given in args:
        if isinstance(given, torch.ScriptObject):
            return dist.ProcessGroup.unbox(given)
    raise ValueError("a collective without a group")


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _gathered(args: tuple[Any, ...], is_far: bool) -> Traffic:
    """What the others hold, which comes over the link."""
    received = _bytes([args[0]]) - _bytes([args[1]])
    return Traffic(gathered=received, far=received * is_far)


def _scattered(args: tuple[Any, ...], is_far: bool) -> Traffic:
    """What is the others' of the sums, in a ring."""
    sent = _bytes([args[1]]) - _bytes([args[0]])
    return Traffic(reduced=sent, far=sent * is_far)


def _all_reduced(args: tuple[Any, ...], is_far: bool) -> Traffic:
    """The sums of a part each, and then all of them, in a ring."""
    size = _group(args).size()
    sent = 2 * _bytes(args[0]) * (size - 1) // size
    return Traffic(reduced=sent, far=sent * is_far)


def _exchanged(args: tuple[Any, ...], is_far: bool) -> Traffic:
    """What is given to the others; each gets as much, but where the numbers of a split are given."""
    size, splits = _group(args).size(), args[4]
    rank = dist.get_rank(_group(args))
    own = args[1].numel() // size if not splits else args[1].numel() // max(1, args[1].shape[0]) * splits[rank]
    sent = (args[1].numel() - own) * args[1].element_size()
    return Traffic(exchanged=sent, exchanged_far=sent * is_far)


_COLLECTIVES: dict[str, Callable[[tuple[Any, ...], bool], Traffic]] = {
    "c10d::_allgather_base_": _gathered,
    "c10d::_reduce_scatter_base_": _scattered,
    "c10d::allreduce_": _all_reduced,
    "c10d::alltoall_base_": _exchanged,
}


def _copied(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Bytes that a copy of FSDP2 reads and writes."""
    given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if (written := kwargs.get("out")) is None:  # into a part of the buffer as large as what is given
        return 2 * _bytes(given)
    return _bytes(given) + _bytes(written if isinstance(written, (list, tuple)) else [written])
