"""Tensors of a model that memory goes to."""

import torch
from torch import nn


def gradient_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
