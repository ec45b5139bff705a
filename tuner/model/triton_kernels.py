"""Attention inside documents in Triton: forward, and backward in two passes, without atomic additions.

Scores never leave the chip (Dao et al. 2022, https://arxiv.org/abs/2205.14135); sums are float32 in an order that does
not depend on the run. A program works on one block of one document for one head; the grid has as many blocks for each
document as the longest has, and those beyond a document's end return at once. Imported where they are launched alone:
Triton is not installed everywhere. What differs between micro-batches is a number to all kernels and nothing that they
are compiled for.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Blocks(NamedTuple):
    """Rows of the program's own block, rows of those that it goes through, warps, and blocks on their way at a time."""

    own: int
    others: int
    warps: int
    stages: int


_HALF: dict[int, tuple[Blocks, Blocks, Blocks]] = {
    64: (Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3)),
    128: (Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2)),
    256: (Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2)),
    512: (Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 2)),
}
_FLOAT: dict[int, tuple[Blocks, Blocks, Blocks]] = {
    64: (Blocks(64, 32, 8, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2)),
    128: (Blocks(64, 32, 8, 2), Blocks(32, 16, 8, 2), Blocks(32, 16, 8, 2)),
    256: (Blocks(32, 16, 8, 2), Blocks(16, 16, 8, 2), Blocks(16, 16, 8, 2)),
}


def blocks_of(width: int, dtype: torch.dtype) -> tuple[Blocks, Blocks, Blocks]:
    """Sizes for the forward pass, the gradient of queries and that of keys and values.

    Such that every GPU since sm_80 has the shared memory, of which the least is 99 KiB (sm_86, sm_89, sm_120).
    """
    table = _FLOAT if dtype == torch.float32 else _HALF
    return table[next(limit for limit in table if width <= limit)]


@triton.jit
def _scores(product, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Scores of products, and what is bent of them over their cap (1 where there is none)."""
    scores = product * SCALE
    bent = scores
    if CAP > 0:
        small = tl.exp2(tl.abs(scores) * (-2 * LOG2_E / CAP))
        bent = tl.where(scores < 0, -1.0, 1.0) * (1 - small) / (1 + small)
        scores = bent * CAP
    return scores, bent


@triton.jit
def _seen(distance, WINDOW: tl.constexpr):
    """Whether a query sees a key that lies so many tokens before it."""
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return seen


@triton.jit
def _heads(pointer, rows, token, WIDTH: tl.constexpr, BLOCK: tl.constexpr, end):
    """Rows of one head ``[rows, BLOCK]``: zeros from ``end`` on and beyond the width."""
    columns = tl.arange(0, BLOCK)
    mask = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * token + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _put(pointer, rows, token, numbers, WIDTH: tl.constexpr, BLOCK: tl.constexpr, end):
    columns = tl.arange(0, BLOCK)
    mask = (rows < end)[:, None] & (columns < WIDTH)[None, :]
    where = pointer + rows.to(tl.int64)[:, None] * token + columns[None, :]
    tl.store(where, numbers.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def _forward(  # noqa: PLR0913, PLR0917 - a kernel's arguments are pointers and numbers
    query, key, value, output, normaliser, bounds,
    blocks, tokens, q_head, q_token, k_head, k_token, v_head, v_token, o_token,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    document, head = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    first = start + (tl.program_id(0) % blocks) * OWN
    if first >= end:
        return
    rows = first + tl.arange(0, OWN)
    own = _heads(query + head * q_head, rows, q_token, D, BLOCK_D, end)
    key += head // GROUP * k_head
    value += head // GROUP * v_head
    highest = tl.full([OWN], float("-inf"), tl.float32)
    total = tl.zeros([OWN], tl.float32)
    mixed = tl.zeros([OWN, BLOCK_V], tl.float32)
    begin = start
    if WINDOW > 0:
        begin = tl.maximum(start, first - WINDOW + 1)
    for at in range(begin, tl.minimum(first + OWN, end), OTHERS):
        columns = at + tl.arange(0, OTHERS)
        keys = _heads(key, columns, k_token, D, BLOCK_D, end)
        scores, _ = _scores(tl.dot(own, tl.trans(keys), input_precision=PRECISION), SCALE, CAP)
        seen = _seen(rows[:, None] - columns[None, :], WINDOW)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(above == float("-inf"), 0.0, above)  # of a row that has seen nothing yet
        share = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(share, 1)
        values = _heads(value, columns, v_token, D_VALUE, BLOCK_V, end)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
        highest = above
    tl.store(normaliser + head * tokens + rows, highest + tl.log2(total), mask=rows < end)
    _put(output + head * D_VALUE, rows, o_token, mixed / total[:, None], D_VALUE, BLOCK_V, end)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def _backward_queries(  # noqa: PLR0913, PLR0917
    query, key, value, output, upstream, normaliser, delta, grad, bounds,
    blocks, tokens, q_head, q_token, k_head, k_token, v_head, v_token, o_token, g_token,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    document, head = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    first = start + (tl.program_id(0) % blocks) * OWN
    if first >= end:
        return
    rows = first + tl.arange(0, OWN)
    own = _heads(query + head * q_head, rows, q_token, D, BLOCK_D, end)
    up = _heads(upstream + head * D_VALUE, rows, o_token, D_VALUE, BLOCK_V, end)
    out = _heads(output + head * D_VALUE, rows, o_token, D_VALUE, BLOCK_V, end)
    ours = tl.sum(up.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta + head * tokens + rows, ours, mask=rows < end)
    norm = tl.load(normaliser + head * tokens + rows, mask=rows < end, other=0.0)
    key += head // GROUP * k_head
    value += head // GROUP * v_head
    found = tl.zeros([OWN, BLOCK_D], tl.float32)
    begin = start
    if WINDOW > 0:
        begin = tl.maximum(start, first - WINDOW + 1)
    for at in range(begin, tl.minimum(first + OWN, end), OTHERS):
        columns = at + tl.arange(0, OTHERS)
        keys = _heads(key, columns, k_token, D, BLOCK_D, end)
        scores, bent = _scores(tl.dot(own, tl.trans(keys), input_precision=PRECISION), SCALE, CAP)
        seen = _seen(rows[:, None] - columns[None, :], WINDOW)
        share = tl.where(seen, tl.exp2(scores * LOG2_E - norm[:, None]), 0.0)
        values = _heads(value, columns, v_token, D_VALUE, BLOCK_V, end)
        slopes = share * (tl.dot(up, tl.trans(values), input_precision=PRECISION) - ours[:, None])
        if CAP > 0:
            slopes = slopes * (1 - bent * bent)
        found += tl.dot(slopes.to(keys.dtype), keys, input_precision=PRECISION)
    _put(grad + head * D, rows, g_token, found * SCALE, D, BLOCK_D, end)


@triton.jit(do_not_specialize=["blocks", "tokens"])
def _backward_keys(  # noqa: PLR0913, PLR0917
    query, key, value, upstream, normaliser, delta, grad_key, grad_value, bounds,
    blocks, tokens, q_head, q_token, k_head, k_token, v_head, v_token, o_token, gk_token, gv_token,
    SCALE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    D_VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    document, kv_head = tl.program_id(0) // blocks, tl.program_id(1).to(tl.int64)
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    first = start + (tl.program_id(0) % blocks) * OWN
    if first >= end:
        return
    columns = first + tl.arange(0, OWN)
    keys = _heads(key + kv_head * k_head, columns, k_token, D, BLOCK_D, end)
    values = _heads(value + kv_head * v_head, columns, v_token, D_VALUE, BLOCK_V, end)
    found_key = tl.zeros([OWN, BLOCK_D], tl.float32)
    found_value = tl.zeros([OWN, BLOCK_V], tl.float32)
    stop = end
    if WINDOW > 0:
        stop = tl.minimum(end, first + OWN + WINDOW - 1)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        for at in range(first, stop, OTHERS):
            rows = at + tl.arange(0, OTHERS)
            others = _heads(query + head * q_head, rows, q_token, D, BLOCK_D, end)
            up = _heads(upstream + head * D_VALUE, rows, o_token, D_VALUE, BLOCK_V, end)
            norm = tl.load(normaliser + head * tokens + rows, mask=rows < end, other=0.0)
            theirs = tl.load(delta + head * tokens + rows, mask=rows < end, other=0.0)
            scores, bent = _scores(tl.dot(keys, tl.trans(others), input_precision=PRECISION), SCALE, CAP)
            seen = _seen(rows[None, :] - columns[:, None], WINDOW) & (rows < end)[None, :]
            share = tl.where(seen, tl.exp2(scores * LOG2_E - norm[None, :]), 0.0)
            found_value += tl.dot(share.to(up.dtype), up, input_precision=PRECISION)
            slopes = share * (tl.dot(values, tl.trans(up), input_precision=PRECISION) - theirs[None, :])
            if CAP > 0:
                slopes = slopes * (1 - bent * bent)
            found_key += tl.dot(slopes.to(others.dtype), others, input_precision=PRECISION)
    _put(grad_key + kv_head * D, columns, gk_token, found_key * SCALE, D, BLOCK_D, end)
    _put(grad_value + kv_head * D_VALUE, columns, gv_token, found_value, D_VALUE, BLOCK_V, end)


def launch_forward(tensors: dict[str, torch.Tensor], longest: int, **numbers: Any) -> None:
    """Fill ``output`` and ``normaliser`` (see :mod:`tuner.model.triton_attention`), in documents of at most longest."""
    _launch(_forward, 0, "query", tensors, longest, numbers)


def launch_backward(tensors: dict[str, torch.Tensor], longest: int, **numbers: Any) -> None:
    """Fill the three gradients, given what the forward pass made and the ``upstream`` gradient of its output."""
    delta = torch.empty_like(tensors["normaliser"])
    shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("grad_")} | {"delta": delta}
    _launch(_backward_queries, 1, "query", shared | {"grad": tensors["grad_query"]}, longest, numbers)
    grads = {name: tensors[name] for name in ("grad_key", "grad_value")}
    shared.pop("output")
    _launch(_backward_keys, 2, "key", shared | grads, longest, numbers)


_STRIDES = {"q": "query", "k": "key", "v": "value"}
_TOKENS = {"g_token": "grad", "gk_token": "grad_key", "gv_token": "grad_value"}
"""Which tensors' strides a kernel takes; output and its gradient are dense, heads inside tokens."""


def _launch(
    kernel: Any, which: int, own: str, tensors: dict[str, torch.Tensor], longest: int, numbers: dict[str, Any]
) -> None:
    """Run a kernel with one program for each block of the tensor ``own``, of each document and head."""
    query, value, bounds = tensors["query"], tensors["value"], tensors["bounds"]
    heads, tokens, width = query.shape
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (width, value.shape[2]))
    sizes = blocks_of(max(width, value.shape[2]), query.dtype)[which]
    blocks = triton.cdiv(longest, sizes.own)
    strides: dict[str, int] = {}
    for letter, name in _STRIDES.items():
        strides |= {f"{letter}_head": tensors[name].stride(0), f"{letter}_token": tensors[name].stride(1)}
    strides["o_token"] = heads * value.shape[2]
    strides |= {name: tensors[of].stride(1) for name, of in _TOKENS.items() if of in tensors}
    kernel[(blocks * (bounds.shape[0] - 1), tensors[own].shape[0])](
        **tensors, **strides, **numbers, blocks=blocks, tokens=tokens, GROUP=heads // value.shape[0], D=width,
        D_VALUE=value.shape[2], BLOCK_D=block_d, BLOCK_V=block_v, OWN=sizes.own, OTHERS=sizes.others,
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32", num_warps=sizes.warps,
        num_stages=sizes.stages,
    )
