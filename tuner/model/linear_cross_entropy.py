"""Cross-entropy of a linear output layer without the logits of the whole batch.

Each chunk of positions makes its logits, its loss and, in the same pass, its gradient, and forgets the logits before
the next chunk starts (the method of Liger Kernel, https://arxiv.org/abs/2410.10989, in plain torch operations).
"""

from typing import Any

import torch

CHUNK_POSITIONS = 2048


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        compute_weight = weight.to(dtype)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias and bias is not None else None
        exact = torch.promote_types(dtype, torch.float32)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        for start in range(0, hidden.shape[0], CHUNK_POSITIONS):
            span = slice(start, start + CHUNK_POSITIONS)
            rows = hidden[span].to(dtype)
            logits = (rows @ compute_weight.T).to(exact)
            if bias is not None:
                logits += bias
            target = targets[span, None]
            log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            loss += (log_normaliser - logits.gather(1, target)).sum()
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            gradient = logits.sub_(log_normaliser).exp_()
            gradient.scatter_add_(1, target, gradient.new_full(target.shape, -1.0))
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(dtype)
            if grad_hidden is not None:
                grad_hidden[span] = gradient @ compute_weight
            if grad_weight is not None:
                grad_weight += gradient.T @ rows
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, None, None)


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Sum of the cross-entropies in nats, a scalar; zero, with a gradient of zeros, for no positions.

    Shapes: hidden ``[N, D]``, weight ``[V, D]``, bias ``[V]``, targets int64 ``[N]``, none of them ignored. The
    products run in autocast's type where autocast is on; normaliser and loss are float32
    (float64 for float64 inputs).
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if not torch.is_grad_enabled():  # the function would still see parameters that want a gradient, and make it
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, dtype)  # type: ignore[no-untyped-call]
    return loss
