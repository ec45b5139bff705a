"""Adapted layers on a GPU: layers that are given one input read it once, and what an adapter adds is added in place.

    y_i = x W_i^T + b_i + s · (x A_i^T) B_i^T

An A ``[r, in]`` is thin: its product takes as long as reading x does. The A of queries, keys and values, or of gate and
up, lie one below the other in one product, and so do their gradients. A sum with a large matrix costs reading and
writing it; a product that adds to its result does both anyway. Torch adds so in place alone: an ``addmm`` with a new
result copies what it adds to, and the compiler makes those in place new again. So all of it is one operation.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tuner.model.adaptable import TOGETHER, held_tensor, takes_product
from tuner.runtime.torch_private import has_hooks

GIVEN_ONE_INPUT = (
    {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"}, {"in_proj_qkvz", "in_proj_ba"},
    {"q_a_proj", "kv_a_proj_with_mqa"},
)  # fmt: skip
"""Names of layers that a module gives one input. Whether it does is seen in each forward."""


def take_together(model: nn.Module, adapter: str) -> None:
    """Have adapted layers whose forward is :func:`~tuner.model.adaptable.add_in_product`'s computed here, in place.

    Those that are given one input together. Each draws its own dropout: where there is any, each is alone.
    """
    for module in model.modules():
        found = ((name, one) for name, one in module.named_children() if hasattr(one, "lora_A"))
        taken: dict[str, Any] = {name: one for name, one in found if takes_product(one, adapter)}
        for one in taken.values():
            setattr(one, TOGETHER, (Together([one]), 0))
        for names in GIVEN_ONE_INPUT:
            group = [one for name, one in taken.items() if name in names]
            bases = [(one.get_base_layer(), one.scaling[adapter]) for one in group]
            alike = {(type(b), held_tensor(b).dtype, b.in_features, b.bias is None, scaling) for b, scaling in bases}
            if len(group) > 1 and len(alike) == 1 and isinstance(group[0].lora_dropout[adapter], nn.Identity):
                together = Together(group)
                module.register_forward_hook(together.clear, always_call=True)
                for number, one in enumerate(group):
                    setattr(one, TOGETHER, (together, number))


class Together:
    """Adapted layers of one module that are given one input: the first that is called computes for all of them.

    What it made for the others is kept until another input comes, or the module's forward ends.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)
        self._source: torch.Tensor | None = None
        self._made: Sequence[torch.Tensor] = ()

    def result(self, number: int, source: torch.Tensor, adapter: str, switch: torch.Tensor | None) -> torch.Tensor:
        """What layer ``number`` makes of ``source`` ``[..., in]``: ``[..., out]``."""
        if len(self._layers) == 1:
            return made_by(self._layers, source, adapter, switch)[0]
        if source is not self._source:
            self._source, self._made = source, made_by(self._layers, source, adapter, switch)
        return self._made[number]

    @property
    def is_plain(self) -> bool:
        """Whether all bases are frozen weights or codes that are multiplied as they are, with nothing around them."""
        bases = [layer.base_layer for layer in self._layers]
        are_known = all(type(base).__name__ in ("Linear", "QuantizedLinear") for base in bases)
        are_bare = not any(has_hooks(base) or "forward" in vars(base) for base in bases)
        trained = (one.requires_grad for base in bases for one in base.parameters(recurse=False))
        return are_known and are_bare and not any(trained)

    def clear(self, *_: object) -> None:
        """Keep nothing: as a hook beyond a module's forward, however that ends."""
        self._source, self._made = None, ()


def made_by(
    layers: Sequence[Any], source: torch.Tensor, adapter: str, switch: torch.Tensor | None
) -> list[torch.Tensor]:
    """What adapted layers of peft's make of one input, in the type of it or of autocast.

    With dropout, which each layer draws for itself, there is one layer. ``switch`` ``[]``, 1 or 0, is whether the
    adapter is on.
    """
    kind = source.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else source.dtype
    rows = source.flatten(0, -2).to(dtype)
    bases = [layer.base_layer for layer in layers]
    # A custom operation is nothing that autocast knows: types are made here. The factor goes into A, which is small.
    downs = torch.cat([layer.lora_A[adapter].weight for layer in layers]).mul(layers[0].scaling[adapter]).to(dtype)
    ups = [layer.lora_B[adapter].weight.to(dtype) for layer in layers]
    if switch is not None:
        ups = [up * switch.to(dtype) for up in ups]
    dropped = layers[0].lora_dropout[adapter](rows)
    is_whole = dropped is rows
    # Apart, so that selective recomputing may keep it. Where nothing was dropped, the operation knows its gradient.
    inner = functional.linear(dropped.detach(), downs.detach()) if is_whole else functional.linear(dropped, downs)
    if hasattr(bases[0], "codes"):
        held = [*(base.codes for base in bases), *(base.scales for base in bases)]
    else:
        held = [base.weight.to(dtype) for base in bases]
    biases = [base.bias.to(dtype) for base in bases if base.bias is not None]
    made: list[torch.Tensor] = adapted_products(rows, inner, held, biases, downs if is_whole else None, ups)
    return [one.view(*source.shape[:-1], -1) for one in made]


@torch.library.custom_op("tuner::adapted_products", mutates_args=())
def adapted_products(
    source: torch.Tensor, inner: torch.Tensor, held: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
    downs: torch.Tensor | None, ups: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Each layer's ``[T, out]`` of ``source`` ``[T, in]``, to which its part of ``inner`` ``[T, R]`` is added.

    ``held`` are weights ``[out, in]``, or codes and then their scales; ``biases`` are all there or none. Of ``inner``
    each layer takes the columns of its rank, times its own of ``ups`` ``[out, r]``. ``downs`` ``[R, in]`` says that
    inner is the product of source with it: gradients go there and to the source, else to inner. Base and biases get
    none.
    """
    made = []
    for number, (base, up, (first, last)) in enumerate(zip(_bases(held, ups), ups, _ranks(ups), strict=True)):
        bias = biases[number] if biases else None
        if len(base) > 1:
            from tuner.model.quantize.linear import quantized_product  # few trainings have codes

            result = quantized_product(source, base[0], base[1], bias, False)
        else:
            result = functional.linear(source, base[0], bias)
        made.append(result.addmm_(inner[:, first:last], up.t()))
    return made


adapted_products.register_fake(
    lambda source, inner, held, biases, downs, ups: [source.new_empty(len(source), len(up)) for up in ups]
)


@torch.library.custom_op("tuner::adapted_products_backward", mutates_args=())
def _backward(
    upstreams: Sequence[torch.Tensor], source: torch.Tensor, inner: torch.Tensor, held: Sequence[torch.Tensor],
    downs: torch.Tensor | None, ups: Sequence[torch.Tensor], wants_source: bool,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Gradients of source (empty where none is wanted), of ``downs`` or else of ``inner``, and of ``ups``."""
    of_inner, of_ups = torch.empty_like(inner), []
    for upstream, up, (first, last) in zip(upstreams, ups, _ranks(ups), strict=True):
        torch.mm(upstream, up, out=of_inner[:, first:last])
        of_ups.append(torch.mm(upstream.t(), inner[:, first:last]))
    of_source = torch.empty_like(source) if wants_source else source.new_empty(0)
    if wants_source:
        for number, (upstream, base) in enumerate(zip(upstreams, _bases(held, ups), strict=True)):
            if len(base) > 1:
                from tuner.model.quantize.linear import gradient_into

                gradient_into(of_source, upstream, (base[0], base[1]), adds=number > 0)
            elif number:
                of_source.addmm_(upstream, base[0])
            else:
                torch.mm(upstream, base[0], out=of_source)
        if downs is not None:
            of_source.addmm_(of_inner, downs)
    return of_source, of_inner if downs is None else torch.mm(of_inner.t(), source), of_ups


@_backward.register_fake
def _gradients(
    upstreams: Any, source: torch.Tensor, inner: Any, held: Any, downs: Any, ups: Any, wants_source: bool
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    of_source = torch.empty_like(source) if wants_source else source.new_empty(0)
    return of_source, torch.empty_like(inner if downs is None else downs), [torch.empty_like(up) for up in ups]


def _bases(held: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Each layer's weight, or its codes and scales."""
    return [tuple(held[number :: len(ups)]) for number in range(len(ups))]


def _ranks(ups: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Where each layer's columns of the inner product begin and end."""
    return [*pairwise(accumulate((up.shape[1] for up in ups), initial=0))]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    source, inner, held, biases, downs, ups = inputs
    ctx.counts = len(held), len(biases), len(ups)
    ctx.save_for_backward(source, inner, *held, *ups, *(() if downs is None else (downs,)))


def _differentiate(ctx: Any, upstreams: list[torch.Tensor]) -> tuple[Any, ...]:
    of_held, of_biases, of_ups = ctx.counts
    source, inner, *others = ctx.saved_tensors
    held, ups, rest = others[:of_held], others[of_held : of_held + of_ups], others[of_held + of_ups :]
    downs = rest[0] if rest else None
    wants_source = ctx.needs_input_grad[0]
    own, second, each = _backward(upstreams, source, inner, held, downs, ups, wants_source)
    of_inner, of_downs = (second, None) if downs is None else (None, second)
    return own if wants_source else None, of_inner, [None] * of_held, [None] * of_biases, of_downs, each


adapted_products.register_autograd(_differentiate, setup_context=_remember)
