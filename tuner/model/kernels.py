"""Kernels that compute for a model in place of its own modules and of plain torch, by the recipe's `model.kernels`.

`liger` is Liger Kernel's, in Triton, on CUDA; `native` is ours in C, compiled for the processor of this machine.
"""

import ast
import importlib
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping
from functools import cache

import torch
from transformers import PreTrainedModel

from tuner.errors import RecipeError
from tuner.model import attention
from tuner.model.adaptable import QUANTIZED
from tuner.model.build import decoder_of, has_score, is_part
from tuner.model.experts import adapted_experts
from tuner.model.native import library
from tuner.model.native.attention import apply_native_rotation
from tuner.model.native.layers import apply_native_gates, apply_native_norms
from tuner.model.native.library import TYPES
from tuner.model.output_layer import Kernel, softmax_into_gradient
from tuner.model.wrap import unwrap


def apply_native(model: PreTrainedModel) -> None:
    """Let the model attend, and compute norms, rotations and gated layers, by kernels compiled for this processor.

    Raises MachineError where they cannot be had.
    """
    library.library()
    if attention.is_ours(model.config):
        model.set_attn_implementation(attention.NATIVE)
    apply_native_norms(model)
    apply_native_rotation(model)
    apply_native_gates(model)
    for layer in model.modules():
        if type(layer).__name__ == QUANTIZED:
            vars(layer)["native"] = True


def apply_liger(model: PreTrainedModel) -> None:
    """Swap norms and MLP of this instance for liger's kernels (CUDA only; the loss is our own).

    Not the rotary embedding: liger's kernel writes into the queries and keys it is given. Where these are a matrix
    product's own result (Llama, Mistral), selective recomputation keeps that very tensor, and would rotate it a second
    time in the backward pass: gradients half wrong under the right loss. It would also replace the function in the
    architecture's module, for every model of the process. Raises RecipeError when liger has no kernels for the
    architecture.
    """
    _quiet_liger()
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model_type = model.config.get_text_config().model_type
    if not has_liger(model_type):
        raise RecipeError(f"model.kernels: liger has no kernels for {model_type}", hint="write kernels: torch")
    whole = decoder_of(model) if has_score(model) or is_part(model) else model  # it knows no model with a score
    _apply_liger_kernel_to_instance(model=whole, rope=False, cross_entropy=False, fused_linear_cross_entropy=False)
    for module in adapted_experts(model).values():
        unwrap(module)  # its kernel would leave their adapters out


def has_liger(model_type: str) -> bool:
    """Whether liger-kernel is installed and has kernels for this architecture, all of whose parts are there."""
    _quiet_liger()
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return False
    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN and _has_parts(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type])


@cache
def _has_parts(function: Callable[..., None]) -> bool:
    """Whether what liger's function for an architecture imports when it is called is there, in both libraries."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(defined, ast.FunctionDef)
    for node in defined.body:  # those that lie deeper depend on what it is asked for
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            try:
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    hasattr(module, name) or importlib.import_module(f"{node.module}.{name}")
            except ImportError:
                return False
    return True


def _quiet_liger() -> None:
    """Liger tries every back end of an operation and warns of those whose libraries are not installed: nobody asked."""
    logging.getLogger("liger_kernel.backends").setLevel(logging.ERROR)


def liger_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross-entropy in nats, a float32 scalar; ``logits`` ``[N, V]`` become its gradient where that is wanted.

    Shapes: targets int64 ``[N]``, none of them ignored, and ``weights`` float32 ``[N]`` of the positions, None for
    ones. Softmax and loss are computed in float32 whatever the logits.

    The kernel is launched here and not through liger's own function, which asks the device how many targets count
    (`.item()`, a wait in every chunk) and splits the logits into chunks too small for large products where the
    vocabulary is large. The one place where that kernel's parameters are written down; `tests/model/test_liger.py`
    holds it to plain torch, in Triton's interpreter where there is no GPU.
    """
    _quiet_liger()
    import triton
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    n_rows, n_columns = logits.shape
    losses = torch.zeros(n_rows, dtype=torch.float32, device=logits.device)
    if n_rows == 0:
        return losses.sum()
    blackwell = logits.is_cuda and torch.cuda.get_device_capability(logits.device)[0] >= 10
    liger_cross_entropy_kernel[(n_rows,)](
        X_ptr=logits, X_stride=logits.stride(0), Y_ptr=targets, Y_stride=targets.stride(0), weight_ptr=None,
        loss_ptr=losses, z_loss_ptr=None, loss_stride=losses.stride(0), token_accuracy_ptr=None,
        token_accuracy_stride=0, predicted_tokens_ptr=None, predicted_tokens_stride=0, n_cols=n_columns,
        n_non_ignore=n_rows, sum_non_ignore_weight=n_rows, ignore_index=-100, weight_sum=0.0, lse_square_scale=0.0,
        label_smoothing=0.0, reduction="sum", softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False, BLOCK_SIZE=min(MAX_FUSED_SIZE, triton.next_power_of_2(n_columns)),
        HAS_WEIGHT=False, HAS_SOFTCAPPING=False, HAS_GRADIENTS=wants_gradient,
        num_warps=8 if blackwell and logits.element_size() == 2 else 32,  # as liger measured
    )
    if weights is None:
        return losses.sum()
    if wants_gradient:  # the kernel weighs the vocabulary's tokens, not positions: one more pass over its gradient
        logits.mul_(weights[:, None])
    return (losses * weights).sum()


def native_into_gradient(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Summed cross-entropy in nats, a float32 scalar; ``logits`` ``[N, V]`` become its gradient where that is wanted.

    Shapes: targets int64 ``[N]``, none of them ignored, and ``weights`` float32 ``[N]`` of the positions, None for
    ones. Softmax and loss are float32 whatever the logits; others than :data:`TYPES` and those of another device are
    computed by torch. Raises IndexError for a target that is no column.
    """
    if logits.is_cuda or logits.dtype not in TYPES or not logits.is_contiguous():
        return softmax_into_gradient(logits, targets, wants_gradient, weights)
    if weights is not None:
        weights = weights.to(torch.float32).contiguous()
    targets, losses = targets.contiguous(), torch.empty(len(logits), dtype=torch.float32)
    bad = library.call(
        "cross_entropy", "CrossEntropy", logits=logits, targets=targets, weights=weights, losses=losses,
        rows=len(logits), columns=logits.shape[1], is_bfloat=logits.dtype == torch.bfloat16,
        wants_gradient=wants_gradient,
    )
    if bad:
        raise IndexError(f"the target at position {bad - 1} is none of {logits.shape[1]} tokens")
    return losses.sum()


KERNELS: Mapping[str, Kernel] = {
    "liger": liger_into_gradient, "native": native_into_gradient, "torch": softmax_into_gradient,
}
"""What turns logits into loss and gradient, by the recipe's `model.kernels`."""
