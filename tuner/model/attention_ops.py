"""What the attention operations of every device share: memory for results, backward passes, sinks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("query", "key", "value")


class QueryKeyValue(NamedTuple):
    """Query ``[heads, T, d]``, key ``[kv_heads, T, d]`` and value ``[kv_heads, T, d_value]``, of one type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Scope(NamedTuple):
    """What attention is asked besides. A query sees ``window`` tokens, all before it for 0."""

    bounds: torch.Tensor
    """Of documents, int32 ``[documents + 1]``."""
    window: int
    scale: float
    cap: float = 0.0
    """Above 0 it bends scores s to cap·tanh(s/cap)."""
    longest: Any = None
    """Of a kernel that wants to know it: int32 ``[1]`` on the CPU, than which no document has more tokens."""


class Results(NamedTuple):
    """The output ``[T, heads, d_value]``, and for the backward pass the logarithm of its normaliser ``[heads, T]``."""

    output: torch.Tensor
    normaliser: torch.Tensor


def attention_operation(
    name: str, given: str,
    forward: Callable[[QueryKeyValue, Scope, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[[torch.Tensor, QueryKeyValue, Results, Scope], Gradients], unit: float = 1.0,
) -> tuple[Any, Any]:
    """Attention inside documents as the operation ``tuner::name``, and that of its backward pass.

    It takes the fields of :class:`QueryKeyValue`, those of :class:`Scope` that the schema ``given`` declares, tensors
    first, and ``sink``, float32 ``[heads]`` or None: one more score of each query, whose value is zero. It gives
    :class:`Results`, whose logarithm is in this ``unit``. ``backward`` is given the gradient of the output, and gives
    gradients whose outer dimension in memory is tokens, as projections want them.
    """
    names = [declared.split()[1] for declared in given.split(", ")]

    def asked(values: Sequence[Any]) -> Scope:
        return Scope(**dict(zip(names, values, strict=False)))

    def run(query: Any, key: Any, value: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sinks = given[len(names) :]
        return forward(QueryKeyValue(query, key, value), asked(given), sinks[0] if sinks else None)

    def run_backward(
        upstream: torch.Tensor, query: Any, key: Any, value: Any, output: Any, normaliser: Any, *given: Any
    ) -> Gradients:
        return backward(upstream, QueryKeyValue(query, key, value), Results(output, normaliser), asked(given))

    heads = "Tensor query, Tensor key, Tensor value"
    schema = f"({heads}, {given}, Tensor? sink=None) -> (Tensor, Tensor)"
    operation = torch.library.custom_op(f"tuner::{name}", run, mutates_args=(), schema=schema)
    operation.register_fake(new_results)
    schema = f"(Tensor upstream, {heads}, Tensor output, Tensor normaliser, {given}) -> (Tensor, Tensor, Tensor)"
    of_backward = torch.library.custom_op(f"tuner::{name}_backward", run_backward, mutates_args=(), schema=schema)
    of_backward.register_fake(new_gradients)
    register_backward(operation, of_backward, unit)
    return operation, of_backward


def dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, each with the numbers of a row next to one another, as kernels read them."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def new_results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the output ``[T, heads, d_value]`` and the normaliser ``[heads, T]``, at least float32."""
    heads, n_tokens, _width = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    return value.new_empty(n_tokens, heads, value.shape[2]), query.new_empty(heads, n_tokens, dtype=exact)


def new_gradients(
    upstream: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> Gradients:
    """Memory for those of query, key and value; tokens are the outer dimension in memory, as projections want them."""
    grads = [tensor.new_empty(query.shape[1], len(tensor), tensor.shape[2]) for tensor in (query, key, value)]
    return grads[0].transpose(0, 1), grads[1].transpose(0, 1), grads[2].transpose(0, 1)


def register_backward(operation: Any, backward: Callable[..., Gradients], unit: float = 1.0) -> None:
    """Have an operation differentiated by another: what it takes is query, key, value, other tensors, numbers, a sink.

    ``backward`` is given the output's gradient, query, key, value, output, normaliser, and the other tensors and
    numbers. The normaliser is a logarithm in this ``unit``; no gradient goes through it.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        *given, sink = inputs
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        ctx.numbers = given[len(tensors) :]
        ctx.save_for_backward(*tensors, *output, sink)
        ctx.mark_non_differentiable(output[1])

    def differentiate(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *others, output, normaliser, sink = ctx.saved_tensors
        grads = backward(upstream, query, key, value, output, normaliser, *others, *ctx.numbers)
        rest = [None] * (len(others) + len(ctx.numbers))
        wanted = sink is not None and ctx.needs_input_grad[len(grads) + len(rest)]
        of_sink = sink_gradient(upstream, output, normaliser, sink, unit) if wanted else None
        return *grads, *rest, of_sink

    operation.register_autograd(differentiate, setup_context=remember)


# Attention sinks: a learned number for each head, one more score of each query, whose value is zero.
#
# It takes a share of every query and gives nothing (gpt-oss; https://arxiv.org/abs/2309.17453 saw sinks first).
# A kernel that knows none serves all the same. Of its output O and the logarithm L of its normaliser, those with a sink
# s are O·sigmoid(L - s) and log(exp L + exp s), and its own backward pass, given these in place of its own, has the
# exact gradients of queries, keys and values: it makes shares as exp(score - L), and subtracts from their slopes what
# the gradient has of O. Only the sink's gradient is left, :func:`sink_gradient`.

LN_2 = 0.6931471805599453
"""The unit of a binary logarithm."""


def with_sinks(
    output: torch.Tensor, normaliser: torch.Tensor, sink: torch.Tensor, unit: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, heads, d]``, changed in place, and normaliser ``[heads, T]`` of a kernel, with sinks ``[heads]``.

    The normaliser is a logarithm in this ``unit``.
    """
    level = sink.to(normaliser.dtype)[:, None]
    output.mul_(torch.sigmoid(normaliser * unit - level).mT.unsqueeze(-1))
    return output, torch.logaddexp(normaliser * unit, level) / unit


def sink_gradient(
    upstream: torch.Tensor, output: torch.Tensor, normaliser: torch.Tensor, sink: torch.Tensor, unit: float = 1.0
) -> torch.Tensor:
    """The gradient ``[heads]`` of sinks, by that of the output ``[T, heads, d]``.

    Output and normaliser ``[heads, T]`` are those with sinks. The slope of a sink's score is minus its share of a
    query, exp(sink - normaliser), times what the gradient has of the query's output.
    """
    along = upstream.to(normaliser.dtype).mul(output).sum(-1).mT  # products rounded to bf16 would not cancel
    return (torch.exp(sink[:, None] - normaliser * unit) * along).sum(1).neg().to(sink.dtype)
