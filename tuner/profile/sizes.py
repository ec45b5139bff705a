"""What of a model is copied between a device and its host."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sizes:
    """What of a model is copied between a device and its host: counts of the whole model."""

    layers: int
    width: int
    trained: int

    @staticmethod
    def of(model: PreTrainedModel) -> Sizes:
        """Those of a model as it is trained, whole or sharded, with storage or without."""
        config = model.config.get_text_config()
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        return Sizes(int(getattr(config, "num_hidden_layers", 0)), int(getattr(config, "hidden_size", 0)), trained)
