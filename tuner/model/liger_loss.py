"""Liger Kernel's cross-entropy: logits become their gradient in one pass over them, in place.

The kernel is launched here and not through liger's own function, which asks the device how many targets count
(`.item()`, a wait in every chunk) and splits the logits into chunks too small for large products where the vocabulary
is large. The one place where that kernel's parameters are written down; `tests/model/test_liger_loss.py` holds it to
plain torch, in Triton's interpreter where there is no GPU.
"""

import torch


def loss_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross-entropy in nats, a float32 scalar; ``logits`` ``[N, V]`` become its gradient where that is wanted.

    Shapes: targets int64 ``[N]``, none of them ignored, and ``weights`` float32 ``[N]`` of the positions, None for
    ones. Softmax and loss are computed in float32 whatever the logits.
    """
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    n_rows, n_columns = logits.shape
    losses = torch.zeros(n_rows, dtype=torch.float32, device=logits.device)
    if n_rows == 0:
        return losses.sum()
    blackwell = logits.is_cuda and torch.cuda.get_device_capability(logits.device)[0] >= 10
    liger_cross_entropy_kernel[(n_rows,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=losses.stride(0),
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=n_columns,
        n_non_ignore=n_rows,
        sum_non_ignore_weight=n_rows,
        ignore_index=-100,
        weight_sum=0.0,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(n_columns)),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=wants_gradient,
        num_warps=8 if blackwell and logits.element_size() == 2 else 32,  # as liger measured
    )
    if weights is None:
        return losses.sum()
    if wants_gradient:  # the kernel weighs the vocabulary's tokens, not positions: one more pass over its gradient
        logits.mul_(weights[:, None])
    return (losses * weights).sum()
