"""What a model does to the products of its output layer before they are logits: a scale and a softcap.

Granite divides them, Cohere multiplies them, and Gemma 2 softcaps them: c·tanh(z/c) (https://arxiv.org/abs/2408.00118).
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

_MULTIPLIED = ("hyperclovax",)
"""Types of model that multiply by what others of the same key divide by."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of the softcap: Gemma 2 and its kin, RecurrentGemma, xLSTM."""


@dataclass(frozen=True)
class LogitTransform:
    """Logits are ``cap · tanh(scale · z / cap)`` of the output layer's products ``z``, without a cap ``scale · z``."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: PretrainedConfig) -> "LogitTransform":
        """As the config says. The probe at start holds the outcome to the model's own logits."""
        text = config.get_text_config()
        scale = float(getattr(text, "logit_scale", None) or 1.0)
        factor = float(getattr(text, "logits_scaling", None) or 1.0)
        scale *= factor if text.model_type.startswith(_MULTIPLIED) else 1 / factor
        cap = next((found for name in _CAPS if (found := getattr(text, name, None)) is not None), None)
        return LogitTransform(scale, None if cap is None else float(cap))

    def apply_(self, products: torch.Tensor) -> torch.Tensor | None:
        """Turn products into logits, in place; the tanh that :meth:`backward_` needs, None without a cap."""
        if self.scale != 1:
            products.mul_(self.scale)
        if self.cap is None:
            return None
        tanh = products.div_(self.cap).tanh_().clone()
        products.mul_(self.cap)
        return tanh

    def backward_(self, gradient: torch.Tensor, tanh: torch.Tensor | None) -> None:
        """Turn the gradient of the logits into that of the products, in place."""
        if tanh is not None:
            torch.ops.aten.tanh_backward.grad_input(gradient, tanh, grad_input=gradient)
        if self.scale != 1:
            gradient.mul_(self.scale)


PLAIN = LogitTransform()
"""Logits are the products."""
