"""Storages of a traced step: each byte from its allocation to its end, with its module and its part.

The step runs on fake tensors, which have shapes and types and no memory. Where fakes and the machine differ in what
they allocate, the tracker follows the machine: custom operations that are made of others are traced into, gradients
that autograd adds up in place are not counted twice, results that fakes cannot make are made, and scratch space inside
of torch's kernels is added.
"""

import math
import os
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tuner.profile.prediction import Part, Phase
from tuner.runtime import torch_private

ALIGNED_BYTES = 16
"""To which the rows of a grouped product are rounded up."""
NUMBER_BYTES = 8
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)


def keeps_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd keeps the number by which a tensor is multiplied or divided: as a tensor, of 8 bytes."""
    return (
        func in _PRODUCTS and isinstance(args[0], torch.Tensor) and not isinstance(args[1], torch.Tensor)
        and args[0].requires_grad and torch.is_grad_enabled()
    )


_MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default: torch.ops.aten.mm.default,
    torch.ops.aten.mm.out: torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default: torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default: torch.ops.aten.addmm.default,
    torch.ops.aten.addmm.out: torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default: torch.ops.aten.baddbmm.default,
}
"""And which is asked for its scratch space: that of a result that is there already is no larger."""
_GROUPED = torch_private.operation("_grouped_mm")
_COPIED_BY_GLOO = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}
"""Which of the tensors given to an operation gloo has a second one of while it is at work."""
_ATTENTION_BACKWARD = {"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"}
"""Both are given the gradient, query, key, value, output, normaliser and the bounds of the documents first."""
_NARROW, _BLOCK_ROWS = 128, 128
_LONGEST, _ASKED = (8192, 4096, 2048), 1 << 33
"""Sides of the products that are asked for, the first with no more operations. Where scratch space holds blocks of the
matrices it hardly grows with longer ones; where it holds the result in float32 it grows as the result does."""
_PADDING = 4096
"""More than what oneDNN adds to a buffer to align it."""
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


def scratch_bytes(func: Any, args: tuple[Any, ...], device: str, deterministic: bool = False) -> int:
    """Bytes that the kernel of an operation holds at its fullest besides its inputs and results.

    On a CPU oneDNN's bf16 products have some, by rules of its own for each processor: it is asked. Where types
    are mixed, numbers of a lesser one are converted first. Gloo gathers into a buffer of its own, and reduces a copy.
    A logsumexp, of one dimension, keeps its exponentials.
    On CUDA the backward pass of attention has some, the more where it is ``deterministic``.
    """
    if func is torch.ops.aten.logsumexp.default:  # the shifted exponentials, and the largest number of each row
        return int((args[0].numel() + args[0].numel() // args[0].shape[args[1][0]]) * args[0].element_size())
    if device != "cpu":
        return _attention_bytes(args, deterministic) if func.name() in _ATTENTION_BACKWARD else 0
    if torch.Tag.pointwise in func.tags:
        return _converted_bytes([arg for arg in args if isinstance(arg, torch.Tensor)])
    if (number := _COPIED_BY_GLOO.get(func.name())) is not None:
        return int(args[number].numel() * args[number].element_size())
    if func not in _MATRIX_PRODUCTS and func is not _GROUPED:
        return 0
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if tensors[0].dtype != torch.bfloat16:
        return 0
    func = _MATRIX_PRODUCTS.get(func, func)
    if func is _GROUPED:
        # The largest of the products that can be: the data decide how rows are spread over groups.
        func, tensors = torch.ops.aten.mm.default, [one[0] if one.dim() == 3 else one for one in tensors[:2]]
    candidates = [tuple(_layout(tensor, longest) for tensor in tensors) for longest in _LONGEST]
    layouts = next((layouts for layouts in candidates if _operations(layouts) <= _ASKED), candidates[-1])
    scratch = _asked(func, layouts)
    accumulated = _accumulator_bytes([shape for shape, _ in layouts])
    # Processors without bf16 instructions sum up a whole matrix in float32 and round it at the end.
    if 0 <= scratch - accumulated < _PADDING:
        scratch += _accumulator_bytes([tuple(tensor.shape) for tensor in tensors]) - accumulated
    return scratch


def _attention_bytes(args: tuple[Any, ...], deterministic: bool) -> int:
    """Of the backward pass of FlashAttention 2 over documents, after ``mha_varlen_bwd`` of torch's ``flash_api.cpp``.

    The gradient of the queries is added up in float32, in rows of whole 32 or 64 columns and with 128 rows between
    documents; so are the products of output and its gradient, one number a row. Deterministic ones keep as many
    sums as there are multiprocessors for each head of a document. Keys and values that several heads share have a
    gradient for each of them first.
    """
    query, key, bounds = args[1], args[2], args[6]
    (tokens, heads, width), documents = query.shape, len(bounds) - 1
    step = 32 if width <= _NARROW else 64
    rows = tokens + _BLOCK_ROWS * documents
    splits = 1
    if deterministic:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        splits = (count + documents * heads - 1) // (documents * heads)
    sums = rows * heads * (splits * -(-width // step) * step + 1) * 4
    shared = 0 if key.shape[1] == heads else 2 * key.shape[0] * heads * width * key.element_size()
    return int(sums + shared)


def _converted_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of operands whose type is not the one that the operation computes in."""
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    common = reduce(torch.promote_types, (tensor.dtype for tensor in tensors if tensor.dim()), torch.bool)
    return sum(t.numel() * common.itemsize for t in tensors if t.dim() and t.dtype != common)


def _accumulator_bytes(shapes: Sequence[tuple[int, ...]]) -> int:
    """Bytes in float32 of the product of two matrices, which come last; of a batch, one of its products."""
    return int(shapes[-2][-2] * shapes[-1][-1] * 4)


def _operations(layouts: Sequence[_Layout]) -> int:
    """Multiplications of a product of matrices, which come last."""
    (first, _), (second, _) = layouts[-2:]
    return math.prod(first) * second[-1]


def _layout(tensor: torch.Tensor, longest: int) -> _Layout:
    """Shape of a tensor, no side longer than the longest, and which of its dimensions are the outer ones."""
    shape = tuple(min(side, longest) for side in tensor.shape)
    strides = tensor.stride()
    return shape, tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


@lru_cache(maxsize=1024)
def _asked(func: Any, layouts: tuple[_Layout, ...]) -> int:
    """What one real product of such matrices has the allocator give out at its fullest, less its result."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it reports every start and stop on stderr
    with torch_private.disable_current_modes(), torch.autocast("cpu", enabled=False), torch.no_grad():
        given = [_zeros(shape, order) for shape, order in layouts]
        func(*given)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = func(*given)
        kept = result.untyped_storage().nbytes()
        del result
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [] if results is None else results.events()
    sizes = sorted((event.start_ns(), int(event.nbytes())) for event in events if event.name() == "[memory]")
    peak = max(accumulate((size for _, size in sizes), initial=0))
    return max(0, peak - int(kept))


def _zeros(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in this order, the outer ones first."""
    inner = torch.zeros([shape[dim] for dim in order], dtype=torch.bfloat16)
    return inner.permute([order.index(dim) for dim in range(len(shape))])


def grouped_product(
    first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What ``aten::_grouped_mm`` gives, in any type: torch's fake one takes bf16 alone, its CPU kernel float32 too."""
    rows, columns = first.shape[-2], second.shape[-1]
    groups = offs.shape[0] if offs is not None else first.shape[0]
    shape = (rows, columns) if first.dim() + second.dim() == 5 else (groups, rows, columns)
    dtype = out_dtype or first.dtype
    step = ALIGNED_BYTES // dtype.itemsize
    width = -(-columns // step) * step
    strides = (width, 1) if len(shape) == 2 else (rows * width, width, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


NAMESPACE = "tuner"
"""Of the custom operations of this package."""
CAST = torch_private.operation("_to_copy")
READ_NUMBER = torch_private.operation("_local_scalar_dense")
"""What the host calls to read a number off a tensor."""
ASK_DEVICE = torch.ops.prim.device.default
"""By which torch asks a fake where it lies: two thirds of all calls, which make nothing."""
COUNTED = 1 << 62
"""Autograd numbers its nodes from 0; those that add to a parameter's gradient have the largest number there is."""
COMMUNICATION: dict[str, Part] = {
    "fsdp::all_gather_copy_in": "gathered",
    "fsdp::split_with_sizes_copy": "gathered",
    "c10d::_allgather_base_": "gathered",
    "c10d::_reduce_scatter_base_": "reduced",
}
"""What the tensors given to these operations of FSDP2 and of collectives are for, where nothing else is known."""


@dataclass
class Storage:
    """One storage: its bytes now, where it was made, and what for once that is known."""

    size: int
    phase: Phase
    module: str
    part: Part | None = None
    recomputed: bool = False
    """Made by a layer that is computed again in the backward pass."""
    given: bool = False
    """Made outside of torch: rows of token ids as numpy lays them down."""
    host: bool = False
    """In the memory of the host, where a device has one of its own."""


@dataclass(frozen=True)
class LiveChange:
    """``delta`` bytes of a storage came or went, at this point of the step."""

    storage: int
    delta: int
    phase: Phase
    module: str


class AllocationTracker(torch_private.TorchDispatchMode):  # type: ignore[misc]  # its type is not known
    """Follows every storage that operations make while the mode is on, of fakes or not, all on the CPU.

    ``target`` is the kind of device that they stand for; ``phase`` is set by who drives the step. Host tensors of whole
    numbers (where documents lie, token ids) stay real, so that code that reads them works as it does in training.
    ``deterministic`` is whether the kernels are; ``compiled`` are the names of the layers that are taken as compiled.
    ``observe`` is called with every operation and its arguments.
    """

    def __init__(self, target: str, deterministic: bool = False, compiled: Collection[str] = ()) -> None:
        super().__init__()
        self.target, self.deterministic, self.compiled = target, deterministic, frozenset(compiled)
        self.observe: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None] = lambda func, args, kwargs: None
        self.phase: Phase = "build"
        self.storages: list[Storage] = []
        self.changes: list[LiveChange] = []
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._holders: Counter[int] = Counter()  # living storages of the trace by the number they are counted under
        self._casts: dict[Any, int] = {}  # the copies that casts in compiled layers made
        self._modules: list[str] = []
        self._nodes: list[tuple[int, str]] = []  # where in autograd's count of nodes a module begins or ends
        self._last = ""  # the module whose backward pass was at work last
        self._numbers: list[int] = []
        self._sum: tuple[int, int] | None = None  # an addition that may have been in place: its result and first term

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation on fakes and enter what it made."""
        self._settle_sum()
        if func is ASK_DEVICE:
            self._take(args)
            return args[0].device
        kwargs = dict(kwargs or {})
        if func.namespace == NAMESPACE and (body := torch_private.custom_body(func)) is not None:
            with self:
                return body(*args, **kwargs)
        self.observe(func, args, kwargs)
        given = list(_tensors_in((*args, *kwargs.values())))
        self._take(given)
        if _stays_real(func, given, kwargs):
            with torch_private.unset_fake_temporarily():
                result = func(*args, **kwargs)
        elif func is READ_NUMBER and isinstance(args[0], torch_private.FakeTensor):
            return _plausible(args[0])
        else:
            result = (grouped_product if func is _GROUPED else func)(*args, **kwargs)
        before = len(self.storages)
        if func is CAST and (layer := self._compiled_layer()) is not None:
            self._enter_cast(layer, args[0], kwargs, result)
        for made in _tensors_in((result,)):
            self._enter(made)
        if (part := COMMUNICATION.get(func.name())) is not None:
            for number in map(self._enter, given):
                if number is not None and self.storages[number].part is None:
                    self.storages[number].part = part
        if (scratch := scratch_bytes(func, args, self.target, self.deterministic)) and given:
            number = self._new(scratch, "other")
            self._change(number, scratch)
            self._change(number, -scratch)
        if self.phase == "forward" and self.target == "cpu" and keeps_number(func, args):
            self._numbers.append(self._new(NUMBER_BYTES, "activations"))
            self._change(self._numbers[-1], NUMBER_BYTES)
        if func is torch.ops.aten.add.Tensor and len(self.storages) == before + 1 and self.phase == "backward":
            self._watch_sum(args, before)
        return result

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Within, know which module of ``root`` is at work, and see what no operation shows.

        That is storages that are resized, as FSDP2 frees what it gathered, and states of the generator of random
        numbers, which each layer that is computed again keeps.
        """
        resize_plainly, state_plainly = torch.UntypedStorage.resize_, torch.get_rng_state

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize_plainly(storage, size)
            self._resized(storage)
            return result

        def state() -> torch.Tensor:
            result = state_plainly()
            self._enter(result)
            return result

        with ExitStack() as stack:
            for name, module in root.named_modules():
                if name.endswith(".base_layer"):  # watched, it would be computed apart from its adapter
                    continue
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
            stack.enter_context(patch.object(torch, "get_rng_state", state))
            yield

    def end_of_backward(self) -> None:
        """Numbers that were kept for the backward pass of this microbatch are gone."""
        self._settle_sum()
        for number in self._numbers:
            self._change(number, -NUMBER_BYTES)
        self._numbers.clear()

    @property
    def module(self) -> str:
        """The innermost module at work: in its forward, or in the backward pass of what its forward did."""
        if self._modules:
            return self._modules[-1]
        if self.phase != "backward":
            return ""
        node = torch_private.current_autograd_node()
        if node is not None and (number := torch_private.node_number(node)) < COUNTED:
            at = bisect_right(self._nodes, (number, "\uffff")) - 1
            self._last = self._nodes[at][1] if at >= 0 else ""
        return self._last

    def assign(self, tensors: Iterable[torch.Tensor], part: Part) -> None:
        """Count these tensors' storages, made before or now, to one part."""
        for tensor in tensors:
            if (number := self._enter(tensor)) is not None:
                self.storages[number].part = part

    def on_host(self, tensor: torch.Tensor, part: Part) -> None:
        """Count a tensor's storage to the host's memory: no byte of a device that has its own, from its start on."""
        if (number := self._enter(tensor)) is not None:
            self.storages[number].part, self.storages[number].host = part, True

    def assign_rest(self, part: Part) -> None:
        """Count what is there and has no part yet to this one."""
        for reference, number in self._living.values():
            if reference() is not None and self.storages[number].part is None:
                self.storages[number].part = part

    def _take(self, given: Iterable[torch.Tensor]) -> None:
        """Enter what an operation is given; what is new was made outside of those that are followed."""
        before = len(self.storages)
        for tensor in given:
            if (made := self._enter(tensor)) is not None and made >= before:
                self.storages[made].part = "batch"
                self.storages[made].given = not tensor.untyped_storage().resizable()

    def _compiled_layer(self) -> str | None:
        """The compiled layer that is computed, for the first time or again; evaluation runs layers as they are."""
        if not self._modules or self.phase == "evaluation":
            return None
        return next((name for name in self.compiled if f"{self._modules[-1]}.".startswith(f"{name}.")), None)

    def _enter_cast(self, layer: str, source: torch.Tensor, kwargs: Mapping[str, Any], result: torch.Tensor) -> None:
        """Enter a copy in another type; as the first one where the compiler finds the same cast made before.

        Autocast casts one input for each product that takes it, and each copy is kept for the backward pass. torch's
        partitioner leaves one of equal operations (``fx_graph_cse``): the bytes of the first are those of the others,
        and there until the last of them is gone.
        """
        view = (self._enter(source), source.storage_offset(), source.shape, source.stride())
        cast = (layer, torch_private.changes_in_place(source), *view, *sorted(kwargs.items()))
        number = self._casts.get(cast)
        number = self._enter(result, number if number is not None and self._holders[number] else None)
        if number is not None:
            self._casts[cast] = number

    def _enter(self, tensor: torch.Tensor, counted: int | None = None) -> int | None:
        """The number of a tensor's storage; a new one is ``counted`` under a number that is there already, if any."""
        local = torch_private.local_tensor(tensor)
        if local.device.type != "cpu":
            return None
        storage = local.untyped_storage()
        key = torch_private.storage_key(storage)
        known = self._living.get(key)
        if known is not None and known[0]() is not None:
            return known[1]
        number = self._new(storage.nbytes(), None) if counted is None else counted
        self._living[key] = (weakref.ref(storage, lambda _: self._ended(key, number)), number)
        self._holders[number] += 1
        if counted is None:
            self._change(number, storage.nbytes())
        return number

    def _new(self, size: int, part: Part | None) -> int:
        recomputed = self.phase == "backward" and bool(self._modules)
        self.storages.append(Storage(size, self.phase, self.module, part, recomputed))
        return len(self.storages) - 1

    def _change(self, number: int, delta: int) -> None:
        self.changes.append(LiveChange(number, delta, self.phase, self.module))

    def _ended(self, key: int, number: int) -> None:
        known = self._living.get(key)
        if known is not None and known[1] == number:
            del self._living[key]
            self._holders[number] -= 1
            if not self._holders[number]:
                self._change(number, -self.storages[number].size)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (known := self._living.get(torch_private.storage_key(storage))) is not None:
            entry = self.storages[known[1]]
            self._change(known[1], storage.nbytes() - entry.size)
            entry.size = storage.nbytes()

    def _watch_sum(self, args: tuple[Any, ...], result: int) -> None:
        """Note an addition in the backward pass: autograd makes it in place where it holds the last reference."""
        if torch_private.current_autograd_node() is None or not isinstance(args[0], torch.Tensor):
            return
        for term in args[:2]:
            number = self._enter(term)
            if number is not None and self.storages[number].size == self.storages[result].size:
                self._sum = (result, number)
                return

    def _settle_sum(self) -> None:
        """Before the next operation: where the first term of the sum has gone, the sum had taken its place."""
        if self._sum is None:
            return
        result, term = self._sum
        self._sum = None
        tail = self.changes[-3:]
        for number, change in enumerate(tail):
            if change.storage == term and change.delta == -self.storages[term].size:
                at = len(self.changes) - len(tail) + number
                made = next(i for i in range(len(self.changes) - 1, -1, -1) if self.changes[i].storage == result)
                if made < at:  # the end of the term comes before the sum
                    self.changes.insert(made, self.changes.pop(at))
                return

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._modules.append(name)
            self._nodes.append((torch_private.sequence_number(), name))

        return hook

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()
        self._nodes.append((torch_private.sequence_number(), self._modules[-1] if self._modules else ""))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among what an operation is given or gives, those in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


def _stays_real(func: Any, given: list[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether all that an operation is given is real, and what it makes shall be."""
    if not given or any(isinstance(tensor, torch_private.FakeTensor) or tensor.is_meta for tensor in given):
        return False
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _plausible(tensor: torch.Tensor) -> bool | int | float:
    """What the host would read from a step that goes well: no flag is set, and numbers are finite."""
    return False if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
