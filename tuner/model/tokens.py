"""New tokens: rows of the embeddings and of the output layer that are trained, whatever else is left as it was."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from tuner.errors import RecipeError
from tuner.model.table import is_plain

_SUMMED_ROWS = 4096


class TrainableTokens(nn.Module):
    """An embedding or output layer whose weight is frozen but for the rows of new tokens, which are a tensor apart.

    ``new_rows`` float32 ``[N, H]`` stand for the rows from ``first`` on of the weight ``[V, H]`` in ``base_layer``, as
    in peft's trainable tokens. Tied layers share both tensors.
    """

    def __init__(self, base_layer: Any, new_rows: nn.Parameter, first: int) -> None:
        super().__init__()
        self.base_layer, self.new_rows, self.first = base_layer, new_rows, first

    @property
    def weight(self) -> torch.Tensor:
        """The whole weight ``[V, H]`` in the type of the frozen one: a copy."""
        weight: torch.Tensor = self.base_layer.weight
        stop = self.first + self.new_rows.shape[0]
        return torch.cat([weight[: self.first], self.new_rows.to(weight.dtype), weight[stop:]])

    @property
    def bias(self) -> torch.Tensor | None:
        """The output layer's bias ``[V]``, if it has one."""
        return getattr(self.base_layer, "bias", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the layer gives with its whole weight: for ids int64 ``[...]``, or for hidden states ``[..., H]``."""
        if isinstance(self.base_layer, nn.Linear):
            return functional.linear(inputs, self.weight, self.bias)
        old: torch.Tensor = self.base_layer(inputs)
        numbers = inputs - self.first
        is_new = (numbers >= 0) & (numbers < self.new_rows.shape[0])
        new = functional.embedding(torch.where(is_new, numbers, 0), self.new_rows)
        scale = getattr(self.base_layer, "embed_scale", None)
        return torch.where(is_new[..., None], (new if scale is None else new * scale).to(old.dtype), old)


def resize_vocabulary(config: PretrainedConfig, new_ids: range) -> None:
    """Give the config the vocabulary that the ids need, in place; unused rows that it has are taken first.

    Where they do not follow on its rows it stays as it is, for the tokenizer does not belong to the model.
    """
    text = config.get_text_config()
    if new_ids and new_ids.start <= text.vocab_size:
        text.vocab_size = max(text.vocab_size, new_ids.stop)


@torch.no_grad()
def resize_embeddings(model: PreTrainedModel, size: int) -> None:
    """Append rows of zeros to the embeddings and the output layer, in place, up to this size."""
    embeddings: Any = model.get_input_embeddings()
    there = int(embeddings.weight.shape[0])
    if size <= there:
        return
    with torch.random.fork_rng(devices=[]):  # it draws rows of its own, which are overwritten
        model.resize_token_embeddings(size, mean_resizing=False)
    for module in _ends(model):
        for tensor in module.parameters(recurse=False):
            tensor[there:] = 0


@torch.no_grad()
def train_new_tokens(model: PreTrainedModel, new_ids: range, drawn: bool) -> None:
    """Have new tokens trained, in place, from the mean of the rows before theirs.

    Layers that are trained in full hold their rows; in others these become a tensor apart (:class:`TrainableTokens`).
    ``drawn``: rows of the former are random like all others, and stay so. On a meta model there is nothing to set.
    Raises RecipeError for an output layer that is adapted, and for embeddings that do more than look up and scale.
    """
    if not new_ids:
        return
    names = {module: name for name, module in model.named_modules()}
    rows: dict[nn.Parameter, nn.Parameter] = {}
    for layer in _ends(model):
        weight = layer.weight
        if hasattr(layer, "base_layer"):
            raise RecipeError(
                f"adapter.target_modules: {names[layer]} gets the rows of new tokens, which no adapter can train",
                hint=f"move it to adapter.modules_to_save: [{names[layer]}]",
            )
        if weight.requires_grad:
            if not (drawn or weight.is_meta):
                for tensor in layer.parameters(recurse=False):
                    tensor[new_ids.start : new_ids.stop] = _mean(tensor[: new_ids.start]).to(tensor)
            continue
        if weight not in rows:
            rows[weight] = nn.Parameter(_mean(weight[: new_ids.start]).repeat(len(new_ids), 1))
        model.set_submodule(names[layer], TrainableTokens(_known(layer), rows[weight], new_ids.start))


def trainable_tokens(model: nn.Module) -> dict[str, TrainableTokens]:
    """The layers whose rows of new tokens are a tensor apart, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TrainableTokens)}


def _ends(model: PreTrainedModel) -> list[Any]:
    """The embeddings and the output layer; a reward model has no output layer."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [layer for layer in ends if layer is not None]


def _known(layer: nn.Module) -> nn.Module:
    if not (is_plain(layer) if isinstance(layer, nn.Embedding) else type(layer).forward is nn.Linear.forward):
        raise RecipeError(
            f"tokenizer.add_tokens: rows of a {type(layer).__name__} cannot be trained alone",
            hint="train the whole layer: adapter.modules_to_save",
        )
    return layer


def _mean(weight: torch.Tensor) -> torch.Tensor:
    """Mean ``[...]`` of the rows of ``[V, ...]`` in float32: to double precision, the same on every machine."""
    if weight.is_meta:
        return torch.empty(weight.shape[1:], dtype=torch.float32, device="meta")
    total = torch.zeros(weight.shape[1:], dtype=torch.float64, device=weight.device)
    for part in weight.split(_SUMMED_ROWS):
        total += part.double().sum(0)
    return (total / len(weight)).float()
