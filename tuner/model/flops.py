"""Arithmetic of training, by the convention of docs/performance.md: what the model asks for, and nothing twice.

A weight of a product costs 2 operations a token forward and 2 for the gradient of its input; 2 more where it is
trained. Attention costs 6 operations for each layer, head, channel and squared token of a document: half of that square
is masked. Embeddings cost none; the output layer is asked for trained tokens alone; of experts those count that a token
goes to. Recomputed layers and filled up rows are work that a step does, and no arithmetic that the model asks for.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tuner.model.attention import CHUNKS, window_of
from tuner.model.build import head_layer

FORWARD, FROZEN, TRAINED = 2, 4, 6
"""Operations for each weight of a product and token: forward, and forward and backward."""
_CODES = (torch.uint8, torch.int8)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Flops:
    """What forward and backward cost: operations per token, per trained token, and of attention."""

    products: float
    """For each token: all linear layers but the output layer."""
    output: float
    """For each trained token: the output layer."""
    attention: Mapping[int | None, float]
    """By window (None: the whole document): operations for each squared token, all layers of that window together."""
    complete: bool = True
    """Whether the config says what attention costs. Where it does not, that part is left out of every sum."""
    forward_products: float = 0.0
    forward_output: float = 0.0
    """Of products and output layer, what their forward pass costs."""
    chunks: Mapping[int, float] = field(default_factory=dict)
    """Of layers that attend inside chunks of so many tokens of a document: as ``attention``."""

    def parts(self, lengths: Sequence[int], n_trained: int) -> dict[str, float]:
        """Operations for documents of these lengths, `n_trained` of whose tokens are trained, by part of the model."""
        attention = sum(each * sum(_square(n, window) for n in lengths) for window, each in self.attention.items())
        attention += sum(each * sum(_square_in_chunks(n, size) for n in lengths) for size, each in self.chunks.items())
        return {"layers": self.products * sum(lengths), "attention": attention, "output": self.output * n_trained}

    def forward_of(self, lengths: Sequence[int], n_trained: int) -> float:
        """Operations of a forward pass alone, without gradients, by which a reference or a teacher is asked."""
        attention = self.parts(lengths, n_trained)["attention"] * FORWARD / TRAINED
        return self.forward_products * sum(lengths) + self.forward_output * n_trained + attention

    def of(self, lengths: Sequence[int], n_trained: int) -> float:
        """Operations for documents of these lengths, `n_trained` of whose tokens are trained."""
        return sum(self.parts(lengths, n_trained).values())


class Product(NamedTuple):
    """A weight that tokens are multiplied by, or several of one shape."""

    inputs: int
    outputs: int
    copies: int
    """How many there are."""
    share: float
    """Of the tokens, that one of them meets: of routed experts the part that goes to each."""
    cost: int
    """Operations of each number for each token: :data:`TRAINED` or :data:`FROZEN`."""
    is_output: bool
    """Whether it is the output layer's, which is asked for trained tokens alone."""

    @property
    def numbers(self) -> float:
        """Those of all of them that a token meets, on the average."""
        return self.inputs * self.outputs * self.copies * self.share


def products_of(model: PreTrainedModel) -> list[Product]:
    """The products of a model as it is trained, a line for each weight: whole or sharded, on any device."""
    head = head_layer(model)
    of_head = set() if head is None else {id(weight) for weight in head.parameters()}
    chosen, experts = 1.0, 0
    with suppress(Exception):  # configs of other kinds of model raise errors of their own
        chosen, experts = _routed(model.config.get_text_config())
    found = []
    for name, weight in _weights(model):
        cost, copies = TRAINED if weight.requires_grad else FROZEN, 1
        outputs, inputs = _shape(model, name, weight)
        is_routed = _is_of_experts(name, weight, experts)
        if is_routed and weight.ndim == 3:
            copies, outputs, inputs = weight.shape
        found.append(Product(inputs, outputs, copies, chosen if is_routed else 1.0, cost, id(weight) in of_head))
    return found


def _shape(model: nn.Module, name: str, weight: nn.Parameter) -> tuple[int, int]:
    """Outputs and inputs of a weight; of a convolution those of a place are inputs, too."""
    if weight.dtype in _CODES:
        layer: Any = model.get_submodule(name)
        return layer.out_features, layer.in_features
    return weight.shape[0], weight.numel() // max(1, weight.shape[0])


def training_flops(model: PreTrainedModel) -> Flops:
    """Count a model as it is trained: with its adapters and frozen weights, whole or sharded, on any device.

    Never raises: a config that does not say heads and layers gives a count that is not ``complete``.
    """
    attention: dict[int | None, float] | None = None
    chunks: dict[int, float] = {}
    with suppress(Exception):  # configs of other kinds of model raise errors of their own
        attention, chunks = _attention(model.config.get_text_config())
    products = output = forward_products = forward_output = 0.0
    for product in products_of(model):
        if product.is_output:
            output += product.numbers * product.cost
            forward_output += product.numbers * FORWARD
        else:
            products += product.numbers * product.cost
            forward_products += product.numbers * FORWARD
    is_complete = attention is not None
    return Flops(products, output, attention or {}, is_complete, forward_products, forward_output, chunks)


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Weights of products, each once; not the originals of modules that an adapter trains in full."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "original_module" in name.split("."):
            continue
        own = dict(module.named_parameters(recurse=False))
        if "codes" in own:  # a quantised layer: its scales are no weight of their own
            own.pop("scales")
        for weight in own.values():
            if weight.ndim >= 2 and id(weight) not in seen:
                seen.add(id(weight))
                yield name, weight


def n_experts(config: PretrainedConfig) -> int:
    """How many routed experts a layer has; 0 without any."""
    return int(next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 0))


def experts_of_token(config: PretrainedConfig) -> int:
    """To how many routed experts of a layer a token goes; 0 without any."""
    return int(next((getattr(config, name) for name in _CHOSEN if getattr(config, name, None)), 0))


def _routed(config: PretrainedConfig) -> tuple[float, int]:
    """The share of the experts that a token meets, and how many there are: 1 and 0 where there are none."""
    experts = n_experts(config)
    chosen = experts_of_token(config)
    return (chosen / experts, experts) if experts and chosen else (1.0, 0)


def _is_of_experts(module: str, weight: nn.Parameter, experts: int) -> bool:
    """Whether a weight is one of an expert's, or all of theirs stacked."""
    stacked = weight.ndim == 3 and weight.shape[0] == experts
    return stacked or re.search(r"\bexperts\.\d+\b", module) is not None


def _attention(config: PretrainedConfig) -> tuple[dict[int | None, float], dict[int, float]]:
    """Operations for each squared token by window, and by size of chunk."""
    kinds = getattr(config, "layer_types", None)
    window = window_of(config)
    if kinds is None:
        layers, chunked = Counter({window: config.num_hidden_layers}), 0
    else:
        windows = {"full_attention": None, "sliding_attention": window}
        windows |= {"hybrid": None, "hybrid_sliding": window}  # attention next to, or after, what keeps a state
        layers = Counter(windows[kind] for kind in kinds if kind in windows)
        chunked = list(kinds).count("chunked_attention")
    heads = config.num_attention_heads
    channels = getattr(config, "head_dim", None) or config.hidden_size // heads
    each, size = float(6 * heads * channels), getattr(config, *CHUNKS, None) or window
    chunks = {size: each * chunked} if size and chunked else {}
    return {window: each * count for window, count in layers.items()}, chunks


def _square(length: int, window: int | None) -> int:
    """Twice the pairs of tokens that see each other: the square, less that of what lies outside the window."""
    return length**2 if window is None or length <= window else length**2 - (length - window) ** 2


def _square_in_chunks(length: int, size: int) -> int:
    """The same of tokens that see each other inside of chunks alone."""
    whole, rest = divmod(length, size)
    return whole * size**2 + rest**2
