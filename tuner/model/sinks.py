"""Attention sinks: a learned number for each head, one more score of each query, whose value is zero.

It takes a share of every query and gives nothing (gpt-oss; https://arxiv.org/abs/2309.17453 is where sinks were seen).
A kernel that knows none serves all the same. Of its output O and the logarithm L of its normaliser, those with a sink
s are O·sigmoid(L - s) and log(exp L + exp s), and its own backward pass, given these in place of its own, has the
exact gradients of queries, keys and values: it makes shares as exp(score - L), and subtracts from their slopes what
the gradient has of O. Only the sink's gradient is left, :func:`sink_gradient`.
"""

import torch

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
    upstream: torch.Tensor,
    output: torch.Tensor,
    normaliser: torch.Tensor,
    sink: torch.Tensor,
    unit: float = 1.0,
) -> torch.Tensor:
    """The gradient ``[heads]`` of sinks, by that of the output ``[T, heads, d]``.

    Output and normaliser ``[heads, T]`` are those with sinks. The slope of a sink's score is minus its share of a
    query, exp(sink - normaliser), times what the gradient has of the query's output.
    """
    along = upstream.to(normaliser.dtype).mul(output).sum(-1).mT  # products rounded to bf16 would not cancel
    return (torch.exp(sink[:, None] - normaliser * unit) * along).sum(1).neg().to(sink.dtype)
