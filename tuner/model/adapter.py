"""Low-rank adapters: peft's layers placed inside the model, whose own parameters are frozen (Hu et al. 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import PreTrainedModel

from tuner.errors import RecipeError

ADAPTER = "default"


@dataclass(frozen=True)
class LoraSpec:
    """Rank, scale numerator, dropout share and the linear layers to adapt (``all-linear``: all but the output)."""

    r: int
    alpha: float
    dropout: float
    target_modules: str | Sequence[str]

    def peft_config(self, base: str | None = None) -> LoraConfig:
        """The same as peft's config, which ``adapter_config.json`` holds."""
        targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # peft multiplies with it; a float works
            lora_dropout=self.dropout,
            target_modules=targets,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )


def add_lora(model: PreTrainedModel, spec: LoraSpec, seed: int) -> None:
    """Put float32 adapter layers into the model, in place; peft freezes all else.

    ``A`` is drawn from ``seed``, ``B`` is zero. On a meta model the adapter's parameters are on meta too. Raises
    RecipeError when no layer matches.
    """
    on_meta = next(model.parameters()).device.type == "meta"
    config = spec.peft_config()
    config.fan_in_fan_out = any(type(module).__name__ == "Conv1D" for module in model.modules())
    if spec.target_modules == "all-linear":
        config.target_modules = linear_layer_names(model)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise RecipeError(
            f"adapter.target_modules: {str(error).splitlines()[0]}",
            hint=f"linear layers of this model: {', '.join(sorted(linear_layer_names(model)))}",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.eval()


def linear_layer_names(model: PreTrainedModel) -> list[str]:
    """Last name components of all linear layers of the decoder, the output layer left out."""
    output = model.get_output_embeddings()
    kinds = ("Linear", "Conv1D")
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ in kinds and module is not output
    }
    return sorted(found)


def without_adapter(name: str) -> str:
    """The parameter's name in the model without adapters (peft keeps the base weight under ``base_layer``)."""
    return name.replace(".base_layer.", ".")
