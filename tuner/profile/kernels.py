"""Where torch's kernels allocate otherwise than its fake ones: results they cannot make, and scratch space."""

import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any

import torch

from tuner.runtime import torch_private

ALIGNED_BYTES = 16
"""To which the rows of a grouped product are rounded up."""
NUMBER_BYTES = 8
_PRODUCTS = (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor)


def keeps_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether autograd keeps the number by which a tensor is multiplied or divided: as a tensor, of 8 bytes."""
    return (
        func in _PRODUCTS
        and isinstance(args[0], torch.Tensor)
        and not isinstance(args[1], torch.Tensor)
        and args[0].requires_grad
        and torch.is_grad_enabled()
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
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
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


IN_PLACE_OF_FAKES: dict[Any, Callable[..., Any]] = {_GROUPED: grouped_product}
